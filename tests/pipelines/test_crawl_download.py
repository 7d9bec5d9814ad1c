"""Bringing a crawl's files: what is fetched, what is kept, what is said about the rest."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from models import files
from models.errors import UserError
from models.fetch import RetryPolicy
from pipelines.crawl import CrawlFile, CrawlManifest
from pipelines.crawl_download import FailedFile, download, ends_whole
from tests.misbehaving_server import MisbehavingServer, Reply, misbehaving_server

POLICY = RetryPolicy(tries=2, sleep=lambda seconds: None)
WET = b"".join(gzip.compress(f"record {number}".encode() * 50, mtime=0) for number in range(20))


@pytest.fixture
def server() -> Iterator[MisbehavingServer]:
    with misbehaving_server() as running:
        yield running


def manifest_of(*urls: str, **known: object) -> CrawlManifest:
    """A manifest whose files are `seg/0.wet.gz`, `seg/1.wet.gz`, ... at these URLs."""
    return CrawlManifest(
        name="n",
        source="s",
        num_shards=len(urls),
        files=tuple(
            CrawlFile.model_validate({"path": f"seg/{i}.wet.gz", "url": url, "shard": i, **known})
            for i, url in enumerate(urls)
        ),
    )


def test_brings_the_first_files_and_points_to_them(
    server: MisbehavingServer, tmp_path: Path
) -> None:
    seen: list[tuple[int, int, int, int | None]] = []
    urls = [
        server.script(f"/{i}", Reply(WET + gzip.compress(b"%d" % i, mtime=0))) for i in range(3)
    ]
    result = download(
        manifest_of(*urls),
        tmp_path,
        count=2,
        policy=POLICY,
        progress=lambda *state: seen.append(state),
    )
    assert result.failures == ()
    assert result.cut == ()
    assert result.manifest.num_shards == 3
    for i, file in enumerate(result.manifest.files):
        path = tmp_path / "seg" / f"{i}.wet.gz"
        assert file == CrawlFile(
            path=f"seg/{i}.wet.gz",
            url=str(path),
            shard=i,
            bytes=path.stat().st_size,
            xxh3=files.xxh3_file(path),
        )
        assert path.read_bytes() == WET + gzip.compress(b"%d" % i, mtime=0)
    assert len(result.manifest.files) == 2
    assert [request.path for request in server.requests] == ["/0", "/1"]
    size = result.manifest.files[0].bytes
    assert seen[0] == (1, 2, 0, size)
    assert seen[-1] == (2, 2, size, size)


def test_complete_files_are_not_fetched_again(server: MisbehavingServer, tmp_path: Path) -> None:
    manifest = manifest_of(server.script("/0", Reply(WET)))
    first = download(manifest, tmp_path, policy=POLICY)
    assert download(manifest, tmp_path, policy=POLICY) == first
    assert download(first.manifest, tmp_path, policy=POLICY) == first
    assert len(server.requests) == 1


def test_what_does_not_fit_is_fetched_again(server: MisbehavingServer, tmp_path: Path) -> None:
    """A cut copy of unknown size, a wrong size, a wrong digest."""
    target = tmp_path / "seg" / "0.wet.gz"
    target.parent.mkdir()
    url = server.script("/0", Reply(WET))
    known = {"bytes": len(WET), "xxh3": files.xxh3_bytes(WET)}
    other = bytearray(WET)
    other[-1] ^= 1
    cases: list[tuple[bytes, dict[str, object]]] = [
        (WET[:-5], {}),
        (WET[:-5], {"bytes": len(WET)}),
        (bytes(other), known),
    ]
    for count, (content, facts) in enumerate(cases, 1):
        target.write_bytes(content)
        result = download(manifest_of(url, **facts), tmp_path, policy=POLICY)
        assert result.failures == ()
        assert target.read_bytes() == WET
        assert len(server.requests) == count


def test_one_failure_does_not_stop_the_rest(server: MisbehavingServer, tmp_path: Path) -> None:
    urls = [
        server.script("/0", Reply(status=404)),
        server.script("/1", Reply(WET, cut_after_bytes=100), Reply(WET)),
        server.script("/2", Reply(status=503)),
        str(tmp_path / "absent.wet.gz"),
        server.script("/4", Reply(WET)),
    ]
    result = download(manifest_of(*urls), tmp_path / "out", policy=POLICY)
    assert [(file.path, file.shard) for file in result.manifest.files] == [
        ("seg/1.wet.gz", 1),
        ("seg/4.wet.gz", 4),
    ]
    assert [failed.path for failed in result.failures] == [f"seg/{i}.wet.gz" for i in (0, 2, 3)]
    reasons = [failed.reason for failed in result.failures]
    assert reasons[:2] == [
        "the server answered 404 Not Found",
        "the server answered 503 Service Unavailable",
    ]
    assert "No such file or directory" in reasons[2]
    assert sorted(path.name for path in (tmp_path / "out" / "seg").iterdir()) == [
        "1.wet.gz",
        "4.wet.gz",
    ]
    assert server.requests[2].range == "bytes=100-"


def test_gives_up_when_all_fail(server: MisbehavingServer, tmp_path: Path) -> None:
    manifest = manifest_of(*[server.script("/x", Reply(status=403))] * 8)
    result = download(manifest, tmp_path, policy=POLICY)
    assert len(server.requests) == 5
    assert result.manifest.files == ()
    assert [failed.reason for failed in result.failures] == [
        *["the server answered 403 Forbidden"] * 5,
        *["not tried after 5 failures in a row"] * 3,
    ]


def test_goes_on_when_only_some_fail(server: MisbehavingServer, tmp_path: Path) -> None:
    good, bad = server.script("/good", Reply(WET)), server.script("/bad", Reply(status=404))
    result = download(manifest_of(*[bad, bad, bad, good] * 3), tmp_path, policy=POLICY)
    assert len(server.requests) == 12
    assert [file.shard for file in result.manifest.files] == [3, 7, 11]
    assert {failed.reason for failed in result.failures} == {"the server answered 404 Not Found"}


def test_wrong_bytes_do_not_stay(server: MisbehavingServer, tmp_path: Path) -> None:
    url = server.script("/0", Reply(WET))
    result = download(manifest_of(url, bytes=len(WET), xxh3="0" * 32), tmp_path, policy=POLICY)
    reason = f"what came from '{url}' is not the file of the manifest"
    assert result.failures == (FailedFile("seg/0.wet.gz", reason),)
    assert list((tmp_path / "seg").iterdir()) == []
    result = download(manifest_of(url, bytes=5), tmp_path, policy=POLICY)
    assert result.failures[0].reason == f"the server has {len(WET)} bytes, expected 5"


def test_published_cut_files_are_kept_and_named(server: MisbehavingServer, tmp_path: Path) -> None:
    result = download(manifest_of(server.script("/0", Reply(WET[:-3]))), tmp_path, policy=POLICY)
    assert result.failures == ()
    assert result.cut == ("seg/0.wet.gz",)
    assert (tmp_path / "seg" / "0.wet.gz").read_bytes() == WET[:-3]


def test_copies_from_folders_and_fsspec(tmp_path: Path) -> None:
    (tmp_path / "in.wet.gz").write_bytes(WET)
    system = fsspec.filesystem("memory")
    system.pipe("/bucket/in.wet.gz", WET[::-1])
    try:
        urls = [str(tmp_path / "in.wet.gz"), "memory://bucket/in.wet.gz", "memory://bucket/gone"]
        result = download(manifest_of(*urls, "nosuch://x"), tmp_path / "out", policy=POLICY)
    finally:
        system.rm("/bucket", recursive=True)
    assert [Path(file.url).read_bytes() for file in result.manifest.files] == [WET, WET[::-1]]
    assert "FileNotFoundError" in result.failures[0].reason
    assert "nosuch" in result.failures[1].reason


def test_files_in_place_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "seg" / "0.wet.gz"
    path.parent.mkdir()
    path.write_bytes(WET)
    before = path.stat()
    result = download(manifest_of(str(path)), tmp_path)
    assert result.manifest.files[0].url == str(path)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_nothing_is_written_outside_the_folder(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "seg").symlink_to(outside)
    with pytest.raises(UserError, match=r"outside of '.*/out', through a link"):
        download(manifest_of("http://127.0.0.1:9/x"), folder, policy=POLICY)
    assert list(outside.iterdir()) == []


def test_impossible_orders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="number of files to download is '0'"):
        download(manifest_of("/x"), tmp_path, count=0)
    twins = tuple(
        CrawlFile(path=path, url=path, shard=0) for path in ("s3://b/x?v=1", "s3://b/x?v=2")
    )
    manifest = CrawlManifest(name="n", source="s", num_shards=1, files=twins)
    with pytest.raises(UserError, match="two files of 'n' would get the same name"):
        download(manifest, tmp_path)


def test_end_of_a_gzip_file(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    tricky = gzip.compress(b"\x1f\x8b\x08\x00" * 500, compresslevel=0, mtime=0)
    last = len(gzip.compress(b"record 19" * 50))
    cases: list[tuple[bytes, bool | None]] = [
        (WET, True),
        (WET + tricky, True),
        (WET[:-1], False),
        (WET[:-8], False),
        ((WET + tricky)[:-1], False),
        (WET[: len(WET) - last + 12], False),
        (b"", None),
        (b"plain text", None),
    ]
    for data, whole in cases:
        path.write_bytes(data)
        assert ends_whole(path) is whole, (len(data), whole)


def test_end_of_a_file_longer_than_the_tail(data_dir: Path, tmp_path: Path) -> None:
    real = next((data_dir / "wet_docs").glob("*-00000.warc.wet.gz"))
    assert real.stat().st_size > 1 << 20
    assert ends_whole(real) is True
    path = tmp_path / "cut.gz"
    path.write_bytes(real.read_bytes()[:5_000_000])
    assert ends_whole(path) is False
