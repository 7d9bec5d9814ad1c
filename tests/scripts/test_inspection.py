"""`gristmill inspect --html`: the page is written, or one line says why not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pipelines.staging import DROPS_SCHEMA, write_drops
from scripts.cli import EXIT_USER_ERROR, main
from tests.pipelines.report_crawl import page, write_crawl

pytest.importorskip("vl_convert", reason="the report needs the extra 'report'")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_crawl(tmp_path / "mined", [page(n, "bn", "head") for n in range(12)])
    return tmp_path


@pytest.mark.parametrize("target", ["mined", "mined/", "mined/manifest.json"])
def test_the_page_is_written(
    target: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    assert main(["inspect", target, "--html", "new/report.html"]) == 0
    out, err = capsys.readouterr()
    text = (place / "new" / "report.html").read_text(encoding="utf-8")
    assert "12 of 12 pages (100.0 %) were kept, in 1 language." in text
    assert re.search(r"https://h[0-6]\.example/\d", text)  # a page to read
    assert "Bengali (bn)" in text
    assert out.startswith("new/report.html: ")
    assert out.endswith(" kB\n")
    assert err == ""


def test_a_manifest_in_the_working_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place / "mined")
    assert main(["inspect", "manifest.json", "--html", "report.html"]) == 0
    assert "Counted over all 12 pages." in Path("report.html").read_text(encoding="utf-8")
    # A report inside the mined folder does no harm to it.
    assert main(["inspect", ".", "--verify"]) == 0


SHARD = "mined/pages/language=bn/bucket=head/part-00000.parquet"
MISTAKES = {
    "a folder": (["mined", "--html", "mined"], ["--html 'mined'", "folder"]),
    "over the manifest": (["mined", "--html", "mined/manifest.json"], ["manifest.json'", ".html"]),
    "over a shard": (["mined", "--html", SHARD], [SHARD, ".html"]),
    "below a file": (["mined", "--html", f"{SHARD}/r.html"], ["cannot be written"]),
    "of a shard": ([SHARD, "--html", "r.html"], [SHARD, "manifest"]),
    "of a folder without manifest": ([".", "--html", "r.html"], ["'.'", "manifest"]),
    "and verify": (["mined", "--html", "r.html", "--verify"], ["'r.html'", "--verify"]),
    "and json": (["mined", "--html", "r.html", "--json"], ["'r.html'", "--json"]),
    "and sample": (["mined", "--html", "r.html", "--sample"], ["'r.html'", "--sample"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, expected = MISTAKES[mistake]
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    assert main(["inspect", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("gristmill: ")
    assert err.count("\n") == 1
    for part in expected:
        assert part in err
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


def test_a_sample_of_a_list_of_drops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "drops.parquet")
    empty = dict.fromkeys(DROPS_SCHEMA.names)
    drops = [empty | {"url": f"http://{n}", "language": ("bn", "sw")[n % 2]} for n in range(6)]
    write_drops(drops, path)
    assert main(["inspect", path, "--sample", "language=sw", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows == drops[1::2]
    assert main(["inspect", path, "--sample", "bucket=head"]) == EXIT_USER_ERROR
    assert "has no column 'bucket'" in capsys.readouterr().err
