"""The front door: each mistake gets one line and exit code 2, and nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.cli import main
from tests.pipelines.wet_files import Page, write_wet


@pytest.fixture
def place(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    data_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A working folder with one good WET file, where the language model is at hand."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRISTMILL_DATA", str(data_dir))
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path_factory.mktemp("cache")))
    subjects = ("mill", "river", "bridge", "school", "harbour", "market", "garden", "church")
    text = "\n".join(f"This line of the page tells about the {name}." for name in subjects)
    write_wet(tmp_path / "good.warc.wet.gz", [Page("http://a.example/", text.encode())])
    return tmp_path


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


GOOD = ["mine", "default", "--input", "good.warc.wet.gz", "--output", "out"]
MISTAKES = {
    "unknown recipe": (["mine", "defualt"], ["'defualt'", "'default'"]),
    "unknown key": ([*GOOD, "--set", "dedup.kep=first"], ["'dedup.kep'", "'keep'"]),
    "a boolean for a number": ([*GOOD, "--set", "language.threshold=true"], ["'true'"]),
    "bad value": ([*GOOD, "--set", "dedup.keep=last"], ["'last'", "'first'"]),
    "no input": (["mine", "default", "--output", "out"], ["--input"]),
    "no output": (["mine", "default", "--input", "good.warc.wet.gz"], ["--output"]),
    "glob without match": (
        ["mine", "default", "--input", "no/*.gz", "--output", "out"], ["'no/*.gz'", "no file"],
    ),
    "input twice": ([*GOOD, "--input", "./good.warc.wet.gz"], ["good.warc.wet.gz'", "twice"]),
    "unknown scheme": (
        ["mine", "default", "--input", "nope://x", "--output", "out"], ["'nope://x'"],
    ),
    "unknown language": (
        [*GOOD, "--set", 'language.allow=["bn", "bengalese"]'], ["'bengalese'"],
    ),
    "language that the model never says": (
        [*GOOD, "--set", 'language.allow=["bn", "ace"]'], ["'ace'"],
    ),
    "missing model": (
        [*GOOD, "--set", "language.model=lid.176.bin"],
        ["'lid.176.bin'", "gristmill models fetch lid.176.bin"],
    ),
    "unknown model": ([*GOOD, "--set", "language.model=lid.ftz"], ["'lid.ftz'"]),
    "not a fastText model": (
        [*GOOD, "--set", "language.model=./good.warc.wet.gz"], ["good.warc.wet.gz"],
    ),
    "no models folder": ([*GOOD, "--set", "quality.models=lm"], ["'lm'"]),
    "cutoffs without models": ([*GOOD, "--set", "quality.cutoffs=c.csv"], ["'c.csv'", "models"]),
    "empty models folder": ([*GOOD, "--set", "quality.models=."], ["'.'", "LANGUAGE.sp.model"]),
    "a folder as input": (["mine", "default", "--input", ".", "--output", "o"], ["'.'", "folder"]),
    "output scheme": ([*GOOD[:-1], "nope://x"], ["'nope://x"]),
    "index_out is a file": (
        [*GOOD, "--set", "dedup.index_out=good.warc.wet.gz"], ["'good.warc.wet.gz'"],
    ),
    "index in and out the same": (
        [*GOOD, "--set", "dedup.index_in=i", "--set", "dedup.index_out=./i/"], ["'i'", "two"],
    ),
    "line break in a value": ([*GOOD, "--set", "name=x\ny"], ["'x\\ny'"]),
    "unknown runner": ([*GOOD, "--", "--runner=Nonsense"], ["Nonsense"]),
    "workers of Beam": ([*GOOD, "--", "--direct_num_workers=2"], ["--workers"]),
    "verify a WET file": (["inspect", "good.warc.wet.gz", "--verify"], ["'good.warc.wet.gz'"]),
    "missing index": ([*GOOD, "--set", "dedup.index_in=idx"], ["'idx'", "index.json"]),
    "unwritable output": (
        ["mine", "default", "--input", "good.warc.wet.gz", "--output", "good.warc.wet.gz/out"],
        ["'good.warc.wet.gz/out'", "--output"],
    ),
    "unknown Beam option": ([*GOOD, "--", "--direct_foo=3"], ["'--direct_foo'", "--runner"]),
    "nothing to inspect": (["inspect", "nowhere"], ["'nowhere'"]),
    "no manifest": (["inspect", "."], ["'.'", "manifest.json"]),
    "list of WET files missing": (["crawl", "no.paths"], ["'no.paths'"]),
    "snapshot misspelled": (["crawl", "CC-MAIN-24-10"], ["'CC-MAIN-24-10'", "CC-MAIN-2024-10"]),
    "unknown model name": (["models", "fetch", "lid"], ["'lid'"]),
    "no tokenizer": (
        ["models", "train-ngram", "good.warc.wet.gz", "--language", "bn", "--output", "lm"],
        ["bn.sp.model", "train-sentencepiece"],
    ),
    "vocabulary": (
        ["models", "train-sentencepiece", "good.warc.wet.gz", "--language", "bn", "--output", "lm",
         "--vocab-size", "many"], ["'many'", "'auto'"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments, expected = MISTAKES[mistake]
    before = listing(place)
    assert main(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("gristmill: ")
    assert err.count("\n") == 1, err
    for part in expected:
        assert part in err, err
    assert listing(place) == before


def test_two_recipes_with_one_output(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(GOOD) == 0
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    capfd.readouterr()
    assert main([*GOOD, "--set", "pages.min_chars=10"]) == 2
    err = capfd.readouterr().err
    assert "'out'" in err
    assert "--restart" in err
    assert err.count("\n") == 1
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


def test_restart_spares_the_index_of_another_run(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (place / "idx").mkdir()
    (place / "idx" / "index.json").write_text("{}")
    before = listing(place)
    assert main([*GOOD, "--restart", "--set", "dedup.index_out=idx"]) == 2
    assert "'idx' holds the index of another run" in capfd.readouterr().err
    assert listing(place) == before


def test_usage_errors_name_what_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["mine"],
        ["mine", "x", "--workers", "0"],
        ["models"],
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert "usage: gristmill" in capsys.readouterr().err


@pytest.mark.parametrize(
    "verb", ["mine", "crawl", "inspect", "models", "train", "evaluate", "export", "demo"]
)
def test_help_shows_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    assert caught.value.code == 0
    assert f"example: gristmill {verb}" in capsys.readouterr().out


def test_dry_run_writes_nothing(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = listing(place)
    assert main([*GOOD, "--dry-run"]) == 0
    out = capfd.readouterr().out
    assert '"common_pages": 100' in out
    assert "\nRAM per worker  " in out
    assert main([*GOOD, "--dry-run", "--json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert [file["name"] for file in shown["plan"]["inputs"]] == ["good.warc.wet.gz"]
    assert shown["recipe"]["dedup"]["common_pages"] == 100
    assert shown["estimate"]["stored_bytes"] == (place / "good.warc.wet.gz").stat().st_size
    portable = ["--", "--runner=PortableRunner", "--job_endpoint=localhost:1"]
    assert main([*GOOD, "--dry-run", "--json", *portable]) == 0
    elsewhere = json.loads(capfd.readouterr().out)
    assert elsewhere["recipe"]["run"]["exchange"] == "auto"
    # There keys go through the shuffle; of this one page they take less than a path would.
    assert elsewhere["estimate"]["shuffle_bytes"] < shown["estimate"]["shuffle_bytes"]
    assert main([*GOOD, "--dry-run", "--", "--runner=Nobody"]) == 2
    assert "unknown runner 'Nobody'" in capfd.readouterr().err
    assert listing(place) == before


def test_inspect_shows_and_verifies(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*GOOD, "--json"]) == 0
    manifest = json.loads(capfd.readouterr().out)
    assert manifest["counts"]["pages"] == {"read": 1, "written": 1, "dropped": {}}
    assert main(["inspect", "out", "--verify"]) == 0
    out = capfd.readouterr().out
    assert "verified: the sums add up, 1 files as listed" in out
    assert main(["inspect", "out", "--sample", "language=en", "-n", "5"]) == 0
    assert "http://a.example/" in capfd.readouterr().out
    shard = place / "out" / manifest["outputs"][0]["path"]
    assert main(["inspect", str(shard)]) == 0
    assert "1 rows" in capfd.readouterr().out
    assert main(["inspect", "good.warc.wet.gz", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["records"]["read"] == 1
    assert main(["inspect", "out", "--sample", "language=xx"]) == 2
    assert "en/all" in capfd.readouterr().err
    shard.write_bytes(shard.read_bytes()[:-1])
    (shard.parent / "stray.parquet").write_bytes(b"")
    assert main(["inspect", "out", "--verify"]) == 1
    out = capfd.readouterr().out
    assert f"'{manifest['outputs'][0]['path']}' differs from its digest" in out
    assert "stray.parquet' stands in the folder, but not in the manifest" in out


def test_crawl_manifest_is_an_input(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (place / "wet.paths").write_text("good.warc.wet.gz\n")
    assert main(["crawl", "wet.paths", "--output", "crawl"]) == 0
    assert "1 WET files in 1 shards" in capfd.readouterr().out
    assert main(["mine", "default", "--input", "crawl/crawl.json", "--output", "out"]) == 0
    assert json.loads((place / "out" / "manifest.json").read_text())["inputs"][0]["name"] == (
        "good.warc.wet.gz"
    )
