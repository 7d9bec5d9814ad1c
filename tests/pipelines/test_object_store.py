"""Object stores: the whole run on s3://, troubles on the way, few requests, plain errors."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import boto3
import fsspec
import numpy as np
import pytest
import s3fs
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends

from models import files, remote
from models.errors import DamagedInput, UserError
from pipelines.arrays import open_arrays, write_arrays
from pipelines.plan import _inputs
from pipelines.recipe import load_recipe
from pipelines.run import mine
from scripts.cli import main
from scripts.inspection import verify_manifest
from tests.pipelines import mining
from tests.pipelines.wet_files import Page, write_wet
from tests.s3_server import S3Server, Trouble, s3_server

GET = frozenset({"GET"})
PUT = frozenset({"PUT"})
POST = frozenset({"POST"})


@pytest.fixture(scope="module")
def running() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def server(running: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """The server with an empty bucket `bucket`; no waits between the tries of this process."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_MAX_ATTEMPTS", "AWS_RETRY_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount",
                        lambda self, context: 0.01)  # fmt: skip
    monkeypatch.setattr(remote, "_WAITS_S", (0.01, 0.01, 0.01))
    s3fs.S3FileSystem.clear_instance_cache()
    running.clear()
    store(running).create_bucket(Bucket="bucket")
    running.clear()
    yield running
    running.clear()
    s3_backends[DEFAULT_ACCOUNT_ID]["aws"].reset()
    s3fs.S3FileSystem.clear_instance_cache()


def store(server: S3Server) -> boto3.client:
    """Another process's view: a client that shares nothing with ours."""
    return boto3.client("s3", endpoint_url=server.endpoint, region_name="us-east-1",
                        aws_access_key_id="other", aws_secret_access_key="other")  # fmt: skip


BODY = np.random.default_rng(0).bytes(300_000)


@pytest.mark.parametrize("kind", ["503", "500", "reset", "cut", "short"])
def test_a_read_goes_on_after(server: S3Server, kind: str) -> None:
    files.write_atomic("s3://bucket/x", BODY)
    server.troubles.append(Trouble(kind, GET, at_most=2))
    assert files.read_bytes("s3://bucket/x") == BODY
    server.troubles[:] = [Trouble(kind, GET, at_most=2)]
    with files.mapped("s3://bucket/x") as view:
        assert view == BODY
    assert server.troubles[0].done == 2


def lines(number: int) -> bytes:
    return "".join(f"paragraph {number * 7 % 23 + n} of the text\n" for n in range(40)).encode()


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Path:
    """Three WET files in `in`, and what a run on this machine's own disk makes of them."""
    folder = tmp_path_factory.mktemp("local")
    (folder / "in").mkdir()
    for number in range(3):
        pages = [Page(f"http://{number}.example/{n}", lines(9 * number + n)) for n in range(9)]
        write_wet(folder / "in" / f"{number}.warc.wet.gz", pages)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRISTMILL_DATA", str(data_dir))
        mining.run(sorted((folder / "in").iterdir()), folder / "out", *SETTINGS)
    return folder


SETTINGS = (mining.NO_LANGUAGE_FILTER, "output.drops=true", "dedup.ranges=2")


def command(*more: str) -> list[str]:
    overrides = [word for one in SETTINGS for word in ("--set", one)]
    return [sys.executable, "-m", "scripts.cli", "mine", "default", "--input", "s3://bucket/in/*.gz",
            "--output", "s3://bucket/out", *overrides, *more]  # fmt: skip


def put_inputs(server: S3Server, local: Path) -> None:
    for path in (local / "in").iterdir():
        store(server).put_object(Bucket="bucket", Key=f"in/{path.name}", Body=path.read_bytes())
    server.clear()


def same_as_local(server: S3Server, local: Path) -> None:
    """The output in the bucket is byte for byte the local one; nothing else is left there."""
    server.clear()
    client = store(server)
    listed = client.list_objects_v2(Bucket="bucket", Prefix="out/")["Contents"]
    theirs = {
        entry["Key"].removeprefix("out/"):
            client.get_object(Bucket="bucket", Key=entry["Key"])["Body"].read()
        for entry in listed
    }  # fmt: skip
    ours = {
        str(path.relative_to(local / "out")): path.read_bytes()
        for path in (local / "out").rglob("*")
        if path.is_file()
    }
    assert sorted(theirs) == sorted(ours)
    assert [name for name in ours if theirs[name] != ours[name] and name != "timings.json"] == []
    assert "manifest.json" in ours
    assert "Uploads" not in client.list_multipart_uploads(Bucket="bucket")


def mine_there(*more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*more), capture_output=True, text=True, timeout=500, check=False)


def test_a_run_of_two_processes_gives_the_bytes_of_a_local_one(
    server: S3Server, local: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRISTMILL_DATA", str(data_dir))
    put_inputs(server, local)
    done = mine_there("--workers", "2", "--set", "run.staging=s3://bucket/staging")
    assert (done.returncode, done.stderr) == (0, "")
    same_as_local(server, local)
    assert "Contents" not in store(server).list_objects_v2(Bucket="bucket", Prefix="staging/")


def test_a_run_through_troubles_gives_the_bytes_of_a_local_one(
    server: S3Server, local: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRISTMILL_DATA", str(data_dir))
    put_inputs(server, local)
    server.troubles += [
        Trouble("503", every=11), Trouble("500", PUT, every=5), Trouble("reset", PUT, every=7),
        Trouble("lost", PUT, every=9), Trouble("cut", GET, every=5, part="/bucket/"),
        Trouble("short", GET, every=13, part="/bucket/"), Trouble("reset", GET, every=17),
    ]  # fmt: skip
    manifest = mine(load_recipe("default", [
        'input.paths=["s3://bucket/in/*.gz"]', "output.directory=s3://bucket/out", *SETTINGS,
    ]))  # fmt: skip
    assert all(trouble.done >= 1 for trouble in server.troubles)
    assert not any(entry.failed for entry in manifest.inputs)
    same_as_local(server, local)
    assert verify_manifest(manifest, "s3://bucket/out") == []


@pytest.mark.parametrize("kind", ["503", "500", "reset", "lost"])
def test_a_write_goes_on_after(server: S3Server, kind: str) -> None:
    server.troubles.append(Trouble(kind, PUT, at_most=3))
    files.write_atomic("s3://bucket/x", BODY)
    assert server.troubles[0].done == 3
    server.clear()
    assert store(server).get_object(Bucket="bucket", Key="x")["Body"].read() == BODY


@pytest.mark.parametrize(
    ("kind", "tries"),
    # The HTTP client itself repeats a GET once, at once, where the connection was reset.
    [("503", 6), ("500", 6), ("reset", 12), ("cut", 4), ("short", 4), ("403", 1)],
)
def test_tries_are_bounded(server: S3Server, kind: str, tries: int) -> None:
    files.write_atomic("s3://bucket/x", BODY)
    server.clear()
    server.troubles.append(Trouble(kind, GET))
    with pytest.raises(OSError, match="s3://bucket/x") as raised:
        files.read_bytes("s3://bucket/x")
    assert server.counts()["GET"] == tries
    assert isinstance(raised.value, UserError) == (kind == "403")


def test_a_failed_write_leaves_nothing(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_S3_PART_BYTES", 5 << 20)
    large = BODY * 37  # 11.1 MB, in three parts
    for body in (BODY, large):
        server.troubles.append(Trouble("500", PUT, every=2 if body is large else 1))
        server.troubles.append(Trouble("reset", PUT))
        with pytest.raises(OSError, match="s3://bucket/x"):
            files.write_atomic("s3://bucket/x", body)
        server.clear()
        assert not files.exists("s3://bucket/x")
        assert "Uploads" not in store(server).list_multipart_uploads(Bucket="bucket")
    server.troubles += [Trouble("reset", PUT, every=2), Trouble("lost", POST, every=2)]
    files.write_atomic("s3://bucket/x", large)
    server.clear()
    assert store(server).get_object(Bucket="bucket", Key="x")["Body"].read() == large
    assert "Uploads" not in store(server).list_multipart_uploads(Bucket="bucket")


def test_a_stalled_read_is_given_up_and_tried_again(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": {"read_timeout": 0.5}})
    files.write_atomic("s3://bucket/x", BODY)
    server.troubles.append(Trouble("stall", GET, at_most=1))
    started = time.monotonic()
    assert files.read_bytes("s3://bucket/x") == BODY
    assert server.troubles[0].done == 1
    assert time.monotonic() - started < server.stall_s / 2


def test_what_others_write_and_remove_is_seen_at_once(server: S3Server) -> None:
    client = store(server)
    for round_ in range(2):
        assert not files.exists("s3://bucket/f/x")
        assert files.find("s3://bucket/f", "*") == []
        client.put_object(Bucket="bucket", Key="f/x", Body=b"1" * (round_ + 1))
        assert files.exists("s3://bucket/f/x")
        assert files.find("s3://bucket", "f/*") == ["s3://bucket/f/x"]
        assert files.size_bytes("s3://bucket/f/x") == round_ + 1
        assert files.read_bytes("s3://bucket/f/x") == b"1" * (round_ + 1)
        client.delete_object(Bucket="bucket", Key="f/x")


def test_removing(server: S3Server) -> None:
    for name in ("f/a", "f/g/b", "fg"):
        files.write_atomic(f"s3://bucket/{name}", b"x")
    files.remove("s3://bucket/f/a")
    files.remove("s3://bucket/f/a")
    assert files.find("s3://bucket/f", "**") == ["s3://bucket/f/g/b"]
    server.troubles.append(Trouble("ignored", POST, at_most=1))
    files.remove_tree("s3://bucket/f")
    assert server.troubles[0].done == 1
    files.remove_tree("s3://bucket/f")
    assert files.find("s3://bucket", "**") == ["s3://bucket/fg"]
    files.write_atomic("s3://bucket/f/a", b"x")
    server.troubles[:] = [Trouble("ignored", POST)]
    with pytest.raises(OSError, match="could not be removed"):
        files.remove_tree("s3://bucket/f")


def test_a_remote_array_file_is_read_in_pieces(server: S3Server) -> None:
    values = np.arange(600_000, dtype=np.uint64)
    write_arrays("s3://bucket/a", {"values": values, "few": values[:5]}, {"xxh3": "x"})
    server.clear()
    with open_arrays("s3://bucket/a") as file:
        assert file.header == {"xxh3": "x"}
        assert np.array_equal(file.read("few"), values[:5])
        assert server.counts() == {"HEAD": 1, "GET": 1}
        assert np.array_equal(file.read("values", 40_000, 70_000), values[40_000:70_000])
        assert file.read("values", 7, 7).size == 0
    assert server.counts() == {"HEAD": 1, "GET": 2}
    assert server.requests[-1].range == f"bytes={1 << 18}-{(3 << 18) - 1}"
    data = bytearray(files.read_bytes("s3://bucket/a"))
    data[8 * 50_000] ^= 1
    files.write_atomic("s3://bucket/a", bytes(data))
    with open_arrays("s3://bucket/a") as file:
        assert np.array_equal(file.read("values", 0, 9), values[:9])
        with pytest.raises(DamagedInput, match=r"s3://bucket/a.*checksum in 'values'"):
            file.read("values", 40_000, 70_000)
    files.write_atomic("s3://bucket/a", data[:-9])
    with pytest.raises(DamagedInput, match="is cut"), open_arrays("s3://bucket/a"):
        pass


@pytest.fixture
def many(server: S3Server) -> list[str]:
    """2,500 inputs in two folders, of 1 to 2,500 bytes."""
    backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    names = [f"crawl/{number % 2}/wet/{number:05d}.warc.wet.gz" for number in range(2500)]
    for number, name in enumerate(names):
        backend.put_object("bucket", name, b"x" * (number + 1))
    server.clear()
    return names


def inputs_of(*entries: str) -> list[tuple[str, int]]:
    recipe = load_recipe("default", [f"input.paths={json.dumps(entries)}"])
    return [(file.url.removeprefix("s3://bucket/"), file.bytes) for file in _inputs(recipe)]


def test_many_inputs_are_planned_in_few_requests(
    server: S3Server, many: list[str], tmp_path: Path
) -> None:
    expected = [(name, number + 1) for number, name in enumerate(many)]
    found = inputs_of("s3://bucket/crawl/*/wet/*.warc.wet.gz")
    assert found == sorted(expected)
    # The pattern itself might be a file (2), the list of crawl (1), two folders of 1,250 (2 each).
    assert server.counts() == {"HEAD": 1, "GET": 6}
    server.clear()
    manifest = {"name": "x", "source": "x", "num_shards": 1, "files": [
        {"path": name, "url": f"s3://bucket/{name}", "shard": 0} for name in many]}  # fmt: skip
    (tmp_path / "crawl.json").write_text(json.dumps(manifest))
    assert inputs_of(str(tmp_path / "crawl.json")) == expected
    assert server.counts() == {"GET": 4}
    server.clear()
    few = [f"s3://bucket/{name}" for name in many[:6]]
    assert inputs_of(*few) == expected[:6]
    assert server.counts() == {"HEAD": 6}


def test_wildcards(server: S3Server) -> None:
    for name in ("w/a1/x.gz", "w/a2/x.gz", "w/b1/x.gz", "w/a1/deep/x.gz", "w/a1/y", "w/[a]/x.gz"):
        files.write_atomic(f"s3://bucket/{name}", b"x")
    for pattern, names in [
        ("*/x.gz", ["[a]", "a1", "a2", "b1"]),
        ("a[12]/x.gz", ["a1", "a2"]),
        ("?1/*.gz", ["a1", "b1"]),
        ("nothing*/x.gz", []),
    ]:
        assert [url.split("/")[4] for url in files.find("s3://bucket/w", pattern)] == names
    assert len(files.find("s3://bucket/w", "**/x.gz")) == 5
    assert files.find("s3://bucket/w/[a]", "*") == ["s3://bucket/w/[a]/x.gz"]
    assert files.find("s3://bucket/w/a1", "*") == ["s3://bucket/w/a1/x.gz", "s3://bucket/w/a1/y"]


def refusal(capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """The one line of a mining run that must end with exit code 2."""
    assert main(["mine", "default", *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("inputs", "output", "staging", "wrong"),
    [
        ("s3://nowhere/in/*.gz", "s3://bucket/out", "s3://bucket/st", "s3://nowhere/in"),
        ("s3://nowhere/in/0.gz", "s3://bucket/out", "s3://bucket/st", "s3://nowhere/in/0.gz"),
        ("s3://bucket/in/*.gz", "s3://nowhere/out", "s3://bucket/st", "s3://nowhere/out"),
        ("s3://bucket/in/*.gz", "s3://bucket/out", "s3://nowhere/st", "s3://nowhere/st"),
    ],
)
def test_a_missing_bucket_is_one_line(
    server: S3Server, local: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], inputs: str, output: str, staging: str, wrong: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("GRISTMILL_DATA", str(data_dir))
    put_inputs(server, local)
    line = refusal(capsys, "--input", inputs, "--output", output, "--set", f"run.staging={staging}")
    assert wrong in line
    assert "no such bucket: create it, or repair its name or the endpoint" in line


def test_a_refused_right_is_one_line(
    server: S3Server, local: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("GRISTMILL_DATA", str(data_dir))
    put_inputs(server, local)
    where = ("--input", "s3://bucket/in/*.gz", "--output", "s3://bucket/out")
    for methods in (GET, PUT, frozenset({"HEAD"})):
        server.troubles[:] = [Trouble("403", methods)]
        server.requests.clear()
        line = refusal(capsys, *where)
        assert "access denied" in line
        assert "s3://bucket/" in line
        assert "use credentials that may list, read and write there" in line
        assert server.troubles[0].done <= 2


def test_missing_credentials_are_one_line(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    line = refusal(capsys, "--input", "s3://bucket/in/*.gz", "--output", "s3://bucket/out")
    assert "'s3://bucket/in/*.gz' cannot be used: no credentials" in line
    assert "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in line
    assert server.counts() == {}


def test_mistakes_in_input_paths(server: S3Server, local: Path) -> None:
    put_inputs(server, local)
    for entry, message in [
        ("s3://bucket/in", "is a folder: name the files in it"),
        ("s3://bucket/in/none*.gz", "matches no file"),
        ("s3://bucket/in/none.gz", "matches no file"),
        ("s3://buck*/in/0.gz", "wildcard before the first folder"),
    ]:
        with pytest.raises(UserError, match=message):
            inputs_of(entry)
