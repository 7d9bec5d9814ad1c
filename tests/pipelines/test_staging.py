"""Staging files as the regroup pass reads them: near, far, damaged."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from models import files, remote
from models.errors import Fault
from pipelines.staging import (
    DROPS_SCHEMA,
    STAGING_SCHEMA,
    read_drops,
    read_row_groups,
    write_drops,
)


def staging_file(path: Path, groups: int) -> tuple[str, list[pa.Table]]:
    tables = [
        pa.Table.from_pylist(
            [
                dict.fromkeys(STAGING_SCHEMA.names)
                | {"url": f"http://{group}.example/{page}", "language": f"l{group}",
                   "text": uuid.uuid5(uuid.NAMESPACE_URL, f"{group} {page}").hex * 50}
                for page in range(30)
            ],
            STAGING_SCHEMA,
        )
        for group in range(groups)
    ]  # fmt: skip
    with pq.ParquetWriter(path, STAGING_SCHEMA, use_dictionary=["host", "language", "warc_file"],
                          compression="zstd", write_page_checksum=True) as writer:  # fmt: skip
        for table in tables:
            writer.write_table(table, row_group_size=table.num_rows)
    return files.xxh3_file(path), tables


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[str]:
    """A remote folder; pytest's path makes its name unlike all others."""
    name = f"memory://{tmp_path.name}-{uuid.uuid4().hex}"
    yield name
    fsspec.filesystem("memory").rm(name.removeprefix("memory:/"), recursive=True)


def test_of_a_remote_file_only_the_row_groups_are_fetched(
    tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, url = tmp_path / "pages.parquet", f"{folder}/pages.parquet"
    xxh3, tables = staging_file(local, 300)
    files.write_atomic(url, local.read_bytes())
    fetched: list[int] = []
    read = remote.read

    def counted(url: str, start: int = 0, stop: int | None = None) -> bytes:
        fetched.append(len(data := read(url, start, stop)))
        return data

    monkeypatch.setattr(remote, "read", counted)
    monkeypatch.setattr(remote, "download", lambda *_: pytest.fail("the whole file is fetched"))
    for groups in ([0], [7, 8, 9], [299]):
        assert list(read_row_groups(str(local), xxh3, groups)) == [tables[g] for g in groups]
        assert list(read_row_groups(url, xxh3, groups)) == [tables[g] for g in groups]
    footer_bytes = pq.read_metadata(local).serialized_size
    of_groups = sum(fetched) - footer_bytes - 2 * (256 << 10)  # the end is read, then the rest
    assert of_groups < local.stat().st_size * 5 / 300 * 1.2


def test_a_damaged_or_lost_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "pages.parquet"
    xxh3, _ = staging_file(path, 3)
    whole = path.read_bytes()
    for number, damage in enumerate([whole[:-9], whole[:2000], b"", b"PAR1", None]):
        path.unlink()
        if damage is not None:
            path.write_bytes(damage)
        with pytest.raises(Fault, match=rf"^staging file '{path}' cannot be read \([^\n]+\); "):
            list(read_row_groups(str(path), f"{xxh3}-{number}", [0]))
        if damage is None:
            path.write_bytes(whole)
    flipped = bytearray(whole)
    text = pq.read_metadata(path).row_group(1).column(STAGING_SCHEMA.get_field_index("text"))
    assert text.path_in_schema == "text"
    flipped[text.data_page_offset + text.total_compressed_size - 9] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(Fault, match=f"'{path}' cannot be read .*CRC"):
        list(read_row_groups(str(path), xxh3, [0, 1, 2]))


def test_a_damaged_list_of_drops_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.drops.parquet"
    drop = dict.fromkeys(DROPS_SCHEMA.names) | {"url": "u", "reason": "short"}
    write_drops([drop], str(path))
    assert read_drops(str(path)).to_pylist() == [drop]
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(Fault, match=f"staging file '{path}' cannot be read"):
        read_drops(str(path))
