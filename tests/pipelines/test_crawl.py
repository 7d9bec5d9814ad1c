"""Crawl manifests: CCNet's shards, what a list may hold, what a listed path means."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.errors import UserError
from models.fetch import DownloadFailed, RetryPolicy
from pipelines.crawl import (
    CrawlFile,
    CrawlManifest,
    resolve,
    sample_indices,
    shard_ranges,
)
from tests.misbehaving_server import MisbehavingServer, Reply, misbehaving_server

POLICY = RetryPolicy(tries=2, sleep=lambda seconds: None)
SNAPSHOT = "CC-MAIN-2024-10"
LISTED = [
    f"crawl-data/{SNAPSHOT}/segments/17074/wet/CC-MAIN-{number:05d}.warc.wet.gz"
    for number in range(10)
]


@pytest.fixture
def server() -> Iterator[MisbehavingServer]:
    with misbehaving_server() as running:
        yield running


@pytest.fixture
def base(server: MisbehavingServer) -> str:
    """A server with one snapshot."""
    body = gzip.compress("".join(f"{path}\n" for path in LISTED).encode())
    server.script(f"/crawl-data/{SNAPSHOT}/wet.paths.gz", Reply(body))
    return server.base


def test_shard_ranges_are_ccnets(golden_dir: Path) -> None:
    cases = json.loads((golden_dir / "ccnet_golden.json").read_text())["segment_ranges"]
    assert len(cases) >= 5
    for case in cases:
        ranges = shard_ranges(
            case["n_segments"], case["num_shards"], case["num_segments_per_shard"]
        )
        assert len(ranges) == case["num_shards"]
        expected = case["ranges"]
        found = [[first, last] if last > first else [] for first, last in ranges]
        assert found[: len(expected)] == expected


@given(st.integers(0, 3000), st.integers(1, 400), st.integers(-2, 0))
def test_shards_are_a_partition(n: int, num_shards: int, per_shard: int) -> None:
    ranges = shard_ranges(n, num_shards, per_shard)
    assert [index for first, last in ranges for index in range(first, last)] == list(range(n))
    sizes = [last - first for first, last in ranges]
    assert len(sizes) == num_shards
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(0, 3000), st.integers(1, 400), st.integers(1, 50))
def test_cut_shards_are_heads_of_whole_ones(n: int, num_shards: int, per_shard: int) -> None:
    whole = shard_ranges(n, num_shards)
    cut = shard_ranges(n, num_shards, per_shard)
    for (first, last), (cut_first, cut_last) in zip(whole, cut, strict=True):
        assert list(range(cut_first, cut_last)) == list(range(first, last))[:per_shard]


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 9))
def test_samples_are_spread(n: int, count: int, seed: int) -> None:
    chosen = sample_indices(n, count, seed)
    assert chosen == sample_indices(n, count, seed)
    assert len(chosen) == min(n, count)
    assert chosen == sorted(set(chosen))
    assert chosen[0] >= 0
    assert chosen[-1] < n
    if count < n:
        for stretch, index in enumerate(chosen):
            assert stretch * n // count <= index < (stretch + 1) * n // count


def test_samples_do_not_change() -> None:
    assert sample_indices(90_000, 4) == [7189, 22537, 55123, 70379]
    assert sample_indices(90_000, 4, seed=1) != sample_indices(90_000, 4)


def test_snapshot(base: str, server: MisbehavingServer) -> None:
    manifest = resolve(SNAPSHOT, base_url=base + "/", policy=POLICY)
    assert (manifest.name, manifest.source, manifest.num_shards) == (SNAPSHOT, SNAPSHOT, 10)
    assert [file.path for file in manifest.files] == LISTED
    assert [file.url for file in manifest.files] == [f"{base}/{path}" for path in LISTED]
    assert [file.shard for file in manifest.files] == list(range(10))
    assert {(file.bytes, file.xxh3) for file in manifest.files} == {(None, None)}
    assert len(server.requests) == 1


def test_shards_and_heads_of_shards(base: str) -> None:
    manifest = resolve(SNAPSHOT, base_url=base, num_shards=4, policy=POLICY)
    assert [file.shard for file in manifest.files] == [0, 0, 1, 1, 1, 2, 2, 3, 3, 3]
    manifest = resolve(SNAPSHOT, base_url=base, num_shards=4, segments_per_shard=1, policy=POLICY)
    assert [file.path for file in manifest.files] == [LISTED[index] for index in (0, 2, 5, 7)]
    assert [file.shard for file in manifest.files] == [0, 1, 2, 3]


def test_sample_comes_before_the_shards(base: str) -> None:
    manifest = resolve(SNAPSHOT, base_url=base, sample=4, seed=3, num_shards=2, policy=POLICY)
    assert [file.path for file in manifest.files] == [
        LISTED[index] for index in sample_indices(10, 4, 3)
    ]
    assert [file.shard for file in manifest.files] == [0, 0, 1, 1]
    whole = resolve(SNAPSHOT, base_url=base, sample=99, policy=POLICY)
    assert [file.path for file in whole.files] == LISTED


def test_manifest_is_the_same_bytes_and_comes_back(base: str, tmp_path: Path) -> None:
    manifest = resolve(SNAPSHOT, base_url=base, sample=2, policy=POLICY)
    again = resolve(SNAPSHOT, base_url=base, sample=2, policy=POLICY)
    assert manifest.to_json() == again.to_json()
    manifest.write(tmp_path / "crawl.json")
    assert (tmp_path / "crawl.json").read_text() == manifest.to_json()
    assert CrawlManifest.read(tmp_path / "crawl.json") == manifest
    assert len((tmp_path / "crawl.json").read_text().splitlines()) == 9 + 2 - 1


def test_manifest_text() -> None:
    file = CrawlFile(path="a/é.wet", url="/x/a/é.wet", shard=0, bytes=5)
    manifest = CrawlManifest(name="n", source="s", num_shards=2, files=(file,))
    assert manifest.to_json() == (
        '{\n "schema_version": 1,\n "name": "n",\n "source": "s",\n "num_shards": 2,\n'
        ' "files": [\n'
        '  {"path": "a/é.wet", "url": "/x/a/é.wet", "shard": 0, "bytes": 5, "xxh3": null}\n'
        " ]\n}\n"
    )
    empty = manifest.model_copy(update={"files": ()})
    assert CrawlManifest.model_validate_json(empty.to_json()) == empty


def test_missing_snapshot_is_the_users_mistake(base: str, server: MisbehavingServer) -> None:
    with pytest.raises(UserError, match=r"'CC-MAIN-1999-01' at 'http.*404 Not Found; a source is"):
        resolve("CC-MAIN-1999-01", base_url=base, policy=POLICY)
    assert len(server.requests) == 1
    with pytest.raises(UserError, match="'CC-MAIN-2024': No such file or directory; a source is"):
        resolve("CC-MAIN-2024", base_url=base, policy=POLICY)


def test_busy_server_is_not_the_users_mistake(server: MisbehavingServer) -> None:
    server.script(f"/crawl-data/{SNAPSHOT}/wet.paths.gz", Reply(status=503))
    with pytest.raises(DownloadFailed, match=r"503 Service Unavailable \(2 tries\)"):
        resolve(SNAPSHOT, base_url=server.base, policy=POLICY)


def test_list_by_url(server: MisbehavingServer) -> None:
    """Relative paths are below the list's folder, Common Crawl's own below the base URL."""
    url = server.script("/lists/my.paths?key=1", Reply(b"a/1.wet.gz\ncrawl-data/x/2.wet.gz\n"))
    manifest = resolve(url, policy=POLICY)
    assert manifest.name == "my"
    assert [file.url for file in manifest.files] == [
        f"{server.base}/lists/a/1.wet.gz",
        "https://data.commoncrawl.org/crawl-data/x/2.wet.gz",
    ]


def test_list_through_fsspec() -> None:
    system = fsspec.filesystem("memory")
    system.pipe("/bucket/lists/wet.paths", b"one.wet.gz\ns3://b/two.wet.gz\n")
    try:
        manifest = resolve("memory://bucket/lists/wet.paths")
        manifest.write("memory://bucket/crawl.json")
        assert CrawlManifest.read("memory://bucket/crawl.json") == manifest
    finally:
        system.rm("/bucket", recursive=True)
    assert [file.url for file in manifest.files] == [
        "memory://bucket/lists/one.wet.gz",
        "s3://b/two.wet.gz",
    ]


def test_local_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blank lines, comments, CRLF and a BOM do no harm; sizes are known; the URLs are absolute."""
    for name, size in [("a.wet", 3), ("sub dir/b.wet", 5), ("c.wet", 7)]:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * size)
    absolute = tmp_path / "c.wet"
    text = f"\ufeffa.wet\r\n\r\n# ours\r\n  sub dir/b.wet  \r\nfile://{absolute}"
    (tmp_path / "wet.paths").write_text(text)
    monkeypatch.chdir(tmp_path)
    manifest = resolve("wet.paths")
    assert [(file.path, file.url, file.bytes) for file in manifest.files] == [
        ("a.wet", str(tmp_path / "a.wet"), 3),
        ("sub dir/b.wet", str(tmp_path / "sub dir" / "b.wet"), 5),
        (f"file://{absolute}", f"file://{absolute}", 7),
    ]
    assert manifest.files[2].place == str(absolute).removeprefix("/")


def test_downloaded_snapshot_list_means_the_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "CC-MAIN-2024-10-wet.paths.gz"
    path.write_bytes(gzip.compress(LISTED[0].encode()))
    manifest = resolve(str(path))
    assert manifest.name == SNAPSHOT
    assert manifest.files[0].url == f"https://data.commoncrawl.org/{LISTED[0]}"


def test_a_mirror_may_be_a_folder(tmp_path: Path) -> None:
    listed = tmp_path / f"crawl-data/{SNAPSHOT}/wet.paths.gz"
    wet = tmp_path / LISTED[0]
    wet.parent.mkdir(parents=True)
    wet.write_bytes(b"WET")
    listed.write_bytes(gzip.compress(LISTED[0].encode()))
    manifest = resolve(SNAPSHOT, base_url=str(tmp_path))
    assert [(file.url, file.bytes) for file in manifest.files] == [(str(wet), 3)]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "names no file"),
        (b"\n \n# only words\n", "names no file"),
        (b"a.wet\n../b.wet\n", r"line 2 of .*'\.\./b\.wet' leads upwards"),
        (b"s3://b/x/../y\n", "leads upwards"),
        (b"a\\..\\b\n", "leads upwards"),
        (b"a.wet\n\nb\x00.wet\n", r"line 3 of .*'b\\x00\.wet' holds control characters"),
        (b"/\n", "names no file"),
        (b"s3://b/1\na\nc\ns3://b/1\na\n", r"names 2 files more than once.*'s3://b/1'.*awk"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (b"WARC/1.0\r\nWARC-Type: warcinfo\r\n", "is itself a WET file"),
        (gzip.compress(b"WARC/1.0\r\n", mtime=0), "is itself a WET file"),
        (gzip.compress(b"a.wet\n" * 99, mtime=0)[:-9], "is damaged: .*fetch it again"),
        (b"absent.wet\n", r"1 of 1 listed files do not exist, the first is '/.*/absent\.wet'"),
    ],
)
def test_faulty_lists_are_named(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "wet.paths"
    path.write_bytes(data)
    with pytest.raises(UserError, match=words):
        resolve(str(path))


def test_sources_that_are_no_list(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Is a directory; a source is"):
        resolve(str(tmp_path))
    with pytest.raises(UserError, match="nosuch"):
        resolve("nosuch://x/y")
    huge = tmp_path / "huge"
    with huge.open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(UserError, match="too many for a list"):
        resolve(str(huge))
    huge.write_bytes(gzip.compress(bytes(65 << 20), compresslevel=1))
    with pytest.raises(UserError, match="unpacks to more than"):
        resolve(str(huge))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_shards": 0}, "num_shards is '0'"),
        ({"sample": -1}, "sample is '-1'"),
        ({"segments_per_shard": 2}, "num_shards is not given"),
    ],
)
def test_impossible_options(options: dict[str, int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        resolve(SNAPSHOT, **options)  # type: ignore[arg-type]


FILE = '{"path": "a", "url": "/a", "shard": 0, "bytes": null, "xxh3": null}'
MANIFEST = (
    f'{{"schema_version": 1, "name": "n", "source": "s", "num_shards": 1, "files": [{FILE}]}}'
)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("{", "[", "file: Invalid JSON"),
        ('"schema_version": 1', '"schema_version": 2', "schema_version: Input should be 1"),
        ('"name": "n", ', "", "name: Field required"),
        ('"shard": 0', '"shard": 1', "'a' is in shard 1 of 1"),
        ('"path": "a"', '"path": "../a"', r"files\.0\.path: .*leads upwards"),
        ('"bytes": null', '"bytes": -1', r"files\.0\.bytes"),
        ('"xxh3": null', '"xxh3": "ff"', r"files\.0\.xxh3"),
        ('"shard": 0', '"shard": 0, "x": 1', r"files\.0\.x: Extra"),
    ],
)
def test_faulty_manifests_are_named(tmp_path: Path, old: str, new: str, words: str) -> None:
    path = tmp_path / "crawl.json"
    path.write_text(MANIFEST)
    assert CrawlManifest.read(path).files[0].path == "a"
    path.write_text(MANIFEST.replace(old, new, 1))
    with pytest.raises(UserError, match=words) as caught:
        CrawlManifest.read(path)
    assert "gristmill crawl" in str(caught.value)


def test_missing_manifest_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.json' cannot be read: No such file or directory"):
        CrawlManifest.read(tmp_path / "none.json")
