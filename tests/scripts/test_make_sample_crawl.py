"""The sample crawl's shards, read back by a naive reader of gzip members and WARC headers."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import zlib
from collections import Counter
from pathlib import Path

import pytest

from models.errors import UserError
from models.files import sha256_file
from scripts import make_sample_crawl
from scripts.make_sample_crawl import make
from scripts.sample_sources import read_faults, read_pages, reference_files, sources

HEADERS = [
    "WARC-Type",
    "WARC-Target-URI",
    "WARC-Date",
    "WARC-Record-ID",
    "WARC-Refers-To",
    "WARC-Block-Digest",
    "WARC-Identified-Content-Language",
    "Content-Type",
    "Content-Length",
]


def members(data: bytes) -> list[tuple[str, bytes]]:
    """Every gzip member: ("whole" | "damaged" | "cut", what it inflates to)."""
    found = []
    while data:
        inflater = zlib.decompressobj(31)
        try:
            inflated = inflater.decompress(data)
        except zlib.error:
            found.append(("damaged", b""))
            following = data.find(b"\x1f\x8b\x08\x00\x00\x00\x00\x00", 1)
            data = data[following:] if following > 0 else b""
            continue
        found.append(("whole" if inflater.eof else "cut", inflated))
        data = inflater.unused_data
    return found


def parse(record: bytes) -> tuple[dict[str, str], bytes]:
    """The headers in order and the body, of a record that stands alone."""
    head, _, rest = record.partition(b"\r\n\r\n")
    version, *lines = head.decode().split("\r\n")
    assert version == "WARC/1.0"
    assert rest.endswith(b"\r\n\r\n")
    return dict(line.split(": ", 1) for line in lines), rest[:-4]


def digest(body: bytes) -> str:
    return "sha1:" + base64.b32encode(hashlib.sha1(body).digest()).decode()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make(tmp_path_factory.mktemp("sample"))


@pytest.fixture(scope="module")
def records(shards: list[Path]) -> list[tuple[dict[str, str], bytes]]:
    """Every record that inflates, without the warcinfo records."""
    inflated = [state_data for path in shards for state_data in members(path.read_bytes())]
    parsed = [parse(data) for state, data in inflated if state == "whole"]
    return [(headers, body) for headers, body in parsed if headers["WARC-Type"] != "warcinfo"]


@pytest.fixture(scope="module")
def faulty_urls() -> dict[str, str]:
    """URL by fault kind."""
    return {fault.kind: fault.url for fault in read_faults(sources(), read_pages())}


def test_the_same_bytes_each_time(shards: list[Path], tmp_path: Path) -> None:
    again = make(tmp_path)
    assert [path.name for path in again] == [
        f"CC-SAMPLE-20260401000000-20260401030000-0000{i}.warc.wet.gz" for i in range(4)
    ]
    assert [sha256_file(path) for path in again] == [sha256_file(path) for path in shards]
    assert sorted(tmp_path.iterdir()) == again


def test_pages_and_languages() -> None:
    pages = read_pages()
    languages = Counter(page.language for page in pages)
    assert sorted(languages) == ["ar", "bn", "de", "en", "es", "fr", "hi", "ja", "ru", "sw"]
    assert {code: languages[code] for code in ("de", "en", "es", "fr", "ru")} == {
        "de": 31,
        "en": 41,
        "es": 31,
        "fr": 29,
        "ru": 31,
    }
    assert len({page.url for page in pages}) == len(pages) >= 250


def test_every_record_parses_back(
    records: list[tuple[dict[str, str], bytes]], faulty_urls: dict[str, str]
) -> None:
    pages = {page.url: page for page in read_pages()}
    read = Counter(headers.get("WARC-Target-URI", "no URL") for headers, _ in records)
    lost = {faulty_urls["damaged_member"], faulty_urls["cut_member"]}
    assert set(read) == set(pages) - lost - {faulty_urls["no_url"]} | {"no URL"}
    assert set(read.values()) == {1}
    assert len({headers["WARC-Record-ID"] for headers, _ in records}) == len(records)
    for headers, body in records:
        assert list(headers) == [name for name in HEADERS if name in headers]
        assert headers["WARC-Block-Digest"] == digest(body)
        url = headers.get("WARC-Target-URI", faulty_urls["no_url"])
        short_by_bytes = 40 if url == faulty_urls["wrong_length"] else 0
        assert int(headers["Content-Length"]) == len(body) - short_by_bytes
        assert headers.get("WARC-Identified-Content-Language", "") == pages[url].identified
        if url in {faulty_urls[kind] for kind in ("nul_bytes", "invalid_utf8", "response_record")}:
            continue
        optional = {"WARC-Target-URI", "WARC-Identified-Content-Language"}
        assert set(HEADERS) - set(headers) <= optional
        assert headers["WARC-Type"] == "conversion"
        assert headers["Content-Type"] == "text/plain"
        assert body == pages[url].body()
        assert "{year}" not in body.decode()


def test_some_records_name_no_language(records: list[tuple[dict[str, str], bytes]]) -> None:
    named = [headers for headers, _ in records if "WARC-Identified-Content-Language" in headers]
    assert 0 < len(named) < len(records)


def test_a_warcinfo_record_stands_first(shards: list[Path]) -> None:
    for path in shards:
        parsed = [parse(data)[0] for state, data in members(path.read_bytes()) if state == "whole"]
        assert parsed[0]["WARC-Type"] == "warcinfo"
        assert parsed[0]["WARC-Filename"] == path.name
        assert all(headers["WARC-Type"] != "warcinfo" for headers in parsed[1:])


def test_a_site_stands_in_several_shards(shards: list[Path]) -> None:
    shards_of: dict[str, set[str]] = {}
    for path in shards:
        for state, data in members(path.read_bytes()):
            url = parse(data)[0].get("WARC-Target-URI", "") if state == "whole" else ""
            shards_of.setdefault(url.split("/")[2] if url else "", set()).add(path.name)
    assert len(shards_of["talbote.example.org"]) == 4
    assert len(shards_of["cocinadelaabuela.example.com"]) == 4


def test_member_faults_have_their_places(
    shards: list[Path], records: list[tuple[dict[str, str], bytes]]
) -> None:
    states = [[state for state, _ in members(path.read_bytes())] for path in shards]
    assert [Counter(shard)["damaged"] for shard in states] == [1, 0, 0, 0]
    assert [Counter(shard)["cut"] for shard in states] == [0, 0, 0, 1]
    middle = states[0].index("damaged")
    assert abs(middle - len(states[0]) // 2) <= 1
    assert states[3][-1] == "cut"
    assert members(shards[3].read_bytes())[-1][1].startswith(b"WARC/1.0\r\nWARC-Type: conversion")
    assert len(records) == len(read_pages()) - 2


def test_body_faults(
    records: list[tuple[dict[str, str], bytes]], faulty_urls: dict[str, str]
) -> None:
    by_url = {headers.get("WARC-Target-URI", ""): (headers, body) for headers, body in records}
    pages = {page.url: page for page in read_pages()}

    binary = by_url[faulty_urls["nul_bytes"]][1]
    assert binary.count(b"\0") == 3
    assert binary.replace(b"\0\0\1\2\7\x1b\0\x7f", b"") == pages[faulty_urls["nul_bytes"]].body()

    latin = by_url[faulty_urls["invalid_utf8"]][1]
    with pytest.raises(UnicodeDecodeError):
        latin.decode()
    assert latin.decode("windows-1252").encode() == pages[faulty_urls["invalid_utf8"]].body()

    assert by_url[""][1] == pages[faulty_urls["no_url"]].body()

    headers, body = by_url[faulty_urls["response_record"]]
    assert headers["WARC-Type"] == "response"
    assert headers["Content-Type"] == "application/http; msgtype=response"
    assert "WARC-Refers-To" not in headers
    assert body.startswith(b"HTTP/1.1 200 OK\r\n")


def test_one_shard_holds_everything(tmp_path: Path) -> None:
    (path,) = make(tmp_path, shards=1)
    states = Counter(state for state, _ in members(path.read_bytes()))
    assert states == {"whole": len(read_pages()) - 2 + 1, "damaged": 1, "cut": 1}


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make_sample_crawl.main([str(tmp_path), "--shards", "2"]) == 0
    assert capsys.readouterr().out.split() == [str(path) for path in sorted(tmp_path.iterdir())]
    assert make_sample_crawl.main([str(tmp_path / "x"), "--shards", "0"]) == 2
    assert 'shards is "0"' in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_fault_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites/en-a.txt").write_text(
        "host: a.example\nlanguage: en\n== page: /x | Plain\nOnly ASCII here.\n"
    )
    (tmp_path / "faults.toml").write_text(
        '[[fault]]\nurl = "https://a.example/x"\nkind = "invalid_utf8"\nwhy = "-"\n'
    )
    with pytest.raises(UserError, match=re.escape('"https://a.example/x" is ASCII')):
        make(tmp_path / "out", root=tmp_path)
    assert not (tmp_path / "out").exists()


def test_reference_prose_is_not_on_the_pages() -> None:
    files = reference_files()
    assert sorted(files) == sorted({page.language for page in read_pages()})
    on_pages = {line for page in read_pages() for line in page.lines}
    for language, file in files.items():
        lines = file.read_text(encoding="utf-8").split("\n")
        assert lines.pop() == "", language
        assert 120 <= len(lines) == len(set(lines)) <= 200, language
        assert all(line == line.strip() != "" and line[0] != "#" for line in lines), language
        assert not on_pages & set(lines), language


def test_good_pages_are_recognised(data_dir: Path) -> None:
    """At the default threshold, but for Swahili: lid.176.ftz names it rightly and is never sure."""
    fasttext = pytest.importorskip("fasttext")
    model = fasttext.load_model(str(data_dir / "models/lid.176.ftz"))
    weak = []
    for page in read_pages():
        if page.kind in ("good", "poem"):
            (label,), (score,) = model.predict(" ".join(page.lines))
            threshold = 0.0 if page.language == "sw" else 0.5
            if label != f"__label__{page.language}" or score < threshold:
                weak.append((page.url, label, score))
    assert weak == []


def test_sources_travel_with_a_copied_folder(tmp_path: Path, shards: list[Path]) -> None:
    """An installed copy gives the same bytes as the checkout: nothing depends on its place."""
    shutil.copytree(str(sources()), tmp_path / "copy")
    copied = make(tmp_path / "out", root=tmp_path / "copy")
    assert [sha256_file(path) for path in copied] == [sha256_file(path) for path in shards]
