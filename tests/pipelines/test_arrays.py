"""Array files: what is written is read, a cut or changed file is refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from models.errors import DamagedInput
from pipelines.arrays import open_arrays, write_arrays

BIG = np.arange(200_000, dtype=np.uint64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    target = tmp_path / "some.arrays"
    write_arrays(target, {"big": BIG, "none": np.empty(0, np.uint16)}, {"xxh3": "é"})
    return target


def test_round_trip_and_slices(path: Path) -> None:
    with open_arrays(path) as file:
        assert file.header == {"xxh3": "é"}
        assert file.size("big") == BIG.size
        assert np.array_equal(file.read("big"), BIG)
        for start, stop in [(0, 0), (0, 1), (32_767, 32_769), (199_999, 200_000)]:
            assert np.array_equal(file.read("big", start, stop), BIG[start:stop])
        assert file.read("none").dtype == np.uint16
        assert file.read("none").size == 0
        with pytest.raises(IndexError):
            file.read("big", 5, 200_001)


def test_a_flipped_byte_is_found_where_it_is_read(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8 * 150_000] ^= 1
    path.write_bytes(data)
    with open_arrays(path) as file:
        assert np.array_equal(file.read("big", 0, 1000), BIG[:1000])  # another block
        with pytest.raises(DamagedInput, match=r"some\.arrays.*differs from its checksum in 'big'"):
            file.read("big", 149_000, 151_000)


@pytest.mark.parametrize("keep", [0, 10, 1000, -1, -20])
def test_a_cut_file_is_refused(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DamagedInput, match=r"some\.arrays"), open_arrays(path):
        pass


def test_a_changed_footer_is_refused(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"size": 200000', b'"size": 100000'))
    with pytest.raises(DamagedInput, match="damaged footer"), open_arrays(path):
        pass


def test_same_arrays_same_bytes(path: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    write_arrays(again, {"big": BIG, "none": np.empty(0, np.uint16)}, {"xxh3": "é"})
    assert again.read_bytes() == path.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "some.arrays"]
