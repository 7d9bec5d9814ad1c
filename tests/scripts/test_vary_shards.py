"""Varied shards are sound WET, new throughout, and as repetitive as their source."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from models.errors import UserError
from pipelines.dedup import Block, FileKeys, apply, judge
from pipelines.pages import read_page
from pipelines.paragraphs import paragraph_hashes
from pipelines.recipe import Pages
from pipelines.wet import Record, WetReader
from pipelines.wet_headers import digest_is_right
from scripts import vary_shards
from scripts.vary_shards import Shard, collect_phrases, main, uncompressed_bytes, vary, vary_pages
from tests.pipelines.wet_files import Page, member_bounds, write_wet

COPIES = 3


def records_of(path: Path | str) -> list[Record]:
    reader = WetReader(Path(path).read_bytes())
    records = list(reader)
    assert reader.losses == []
    assert (reader.counts.lost, reader.counts.length_corrected) == (0, 0)
    return records


def keys_of(path: Path | str) -> FileKeys:
    pages = [read_page(record, Pages()) for record in records_of(path)]
    found = paragraph_hashes(
        ["\n".join(page.lines) for page in pages if not page.dropped], "unicode"
    )
    return FileKeys.of(found.hashes, found.offsets)


def shares(paths: list[Path]) -> tuple[float, float]:
    """Distinct and kept paragraphs, for each paragraph."""
    of_file = [keys_of(path) for path in paths]
    verdict = judge([Block(keys.distinct, keys.page_counts) for keys in of_file], keep="first")
    kept = sum(
        int(apply(keys, bits, "first").mask.sum())
        for keys, bits in zip(of_file, verdict.keep, strict=True)
    )
    total = sum(keys.inverse.size for keys in of_file)
    return verdict.distinct / total, kept / total


@pytest.fixture(scope="module")
def sources(data_dir: Path) -> list[Path]:
    return sorted((data_dir / "wet_docs_small").glob("*.gz"))


@pytest.fixture(scope="module")
def varied(sources: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """All sources, COPIES times."""
    wanted = round(sum(map(uncompressed_bytes, sources)) * COPIES * 1.07)
    return vary(list(map(str, sources)), tmp_path_factory.mktemp("varied"), wanted, seed=5)


def test_pages_are_new_and_sound(sources: list[Path], varied: list[Path]) -> None:
    assert len(varied) == len(sources) * COPIES
    urls, ids = set(), set()
    for number, path in enumerate(varied):
        before, after = records_of(sources[number % len(sources)]), records_of(path)
        assert len(before) == len(after)
        assert len(member_bounds(path.read_bytes())) == len(after) + 1  # the warcinfo
        for old, new in zip(before, after, strict=True):
            assert new.body != old.body
            assert new.url.split("/")[:3] == old.url.split("/")[:3]
            assert (new.date, new.identified_language) == (old.date, old.identified_language)
            assert digest_is_right({"WARC-Block-Digest": new.digest}, new.body)
        urls |= {record.url for record in after}
        ids |= {record.record_id for record in after}
    assert len(urls) == len(ids) == sum(len(records_of(path)) for path in varied)


def test_size_is_near_what_was_asked(sources: list[Path], varied: list[Path]) -> None:
    wanted = sum(map(uncompressed_bytes, sources)) * COPIES * 1.07
    assert sum(map(uncompressed_bytes, varied)) == pytest.approx(wanted, rel=0.05)


def test_dedup_finds_the_same_shares_at_each_size(
    sources: list[Path], varied: list[Path], tmp_path: Path
) -> None:
    source = shares(sources)
    assert source == pytest.approx((0.73, 0.73), abs=0.1)  # or the test would prove little
    one_copy = vary(list(map(str, sources)), tmp_path, uncompressed_bytes(sources[0]) * 4, seed=5)
    assert shares(one_copy) == pytest.approx(source, abs=0.01)
    assert shares(varied) == pytest.approx(source, abs=0.01)


def test_duplicates_meet_across_copies(sources: list[Path], varied: list[Path]) -> None:
    def keys(copy: int) -> np.ndarray:
        paths = varied[copy * len(sources) : (copy + 1) * len(sources)]
        return np.unique(np.concatenate([keys_of(path).distinct for path in paths]))

    shared = np.intersect1d(keys(0), keys(1)).size / keys(0).size
    assert 0.005 < shared < 0.1


def test_a_seed_settles_every_byte(sources: list[Path], tmp_path: Path) -> None:
    def made(name: str, seed: int, workers: int = 1) -> list[bytes]:
        paths = vary(list(map(str, sources[:1])), tmp_path / name, 2_000_000, seed, workers)
        assert len(paths) == 2
        return [path.read_bytes() for path in paths]

    assert made("a", 1) == made("b", 1, workers=2)
    assert not set(made("a", 1)) & set(made("c", 2))


def test_equal_paragraphs_stay_equal_and_others_do_not(tmp_path: Path) -> None:
    lines = ["Home", "HOME:", "Page 12", "Page 99", "a line that is long enough to lose a word",
             "", "—", "* * *", "বাংলা ভাষা", "日本語の文章です"]  # fmt: skip
    write_wet(tmp_path / "x.gz", [Page("http://a.example/", b"A page of one line")])
    phrases = collect_phrases([str(tmp_path / "x.gz")])
    record = records_of(tmp_path / "x.gz")[0]

    def edited(copy: int) -> list[str]:
        shard = Shard("x", tmp_path / "y", 0, copy, 8, seed=0)
        body = "\n".join(lines).encode() + b"\n\xff\xfe"
        page = Record("u", "", "", "", "", 0, body, False)
        (new,) = vary_pages([page], 0, shard, phrases)
        assert new.split(b"\n")[-1].startswith(b"\xff\xfe")  # bytes that are no text
        return new.decode("utf-8", "replace").split("\n")

    assert record.body == b"A page of one line"
    for copy in range(8):
        home, other_home, page_12, page_99, *_ = new = edited(copy)
        assert home.split()[0] == "Home"
        assert home.split()[-1] == other_home.split()[-1]  # the same key, the same word
        assert page_12.replace("12", "") == page_99.replace("99", "")
        assert new[5:8] == ["", "—", "* * *"]  # no key, before and after
    for index in (0, 2, 4, 8, 9):
        assert len({edited(copy)[index] for copy in range(8)}) == 8


def test_a_fault_leaves_no_partial_file(
    sources: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> bytes:
        raise OSError("disk full")

    monkeypatch.setattr(vary_shards, "_conversion", fail)
    with pytest.raises(OSError, match="disk full"):
        vary([str(sources[0])], tmp_path / "out", 1000)
    assert list((tmp_path / "out").iterdir()) == []


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.gz").touch()
    with pytest.raises(UserError, match="'0' bytes"):
        vary([str(tmp_path / "empty.gz")], tmp_path / "out", 0)
    for pattern, said in (("*.wet", "matches no file"), ("empty.gz", "'.*empty.gz' holds nothing")):
        arguments = ["--input", f"{tmp_path}/{pattern}", "--output", f"{tmp_path}/o"]
        assert main([*arguments, "--bytes", "1e3"]) == 2
        err = capsys.readouterr().err
        assert err.startswith("vary_shards: ")
        assert said.removeprefix("'.*") in err
    assert not (tmp_path / "o").exists()
