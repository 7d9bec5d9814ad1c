"""Downloads against a server that misbehaves: bytes, number of requests, Range headers."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest

from models.errors import UserError
from models.fetch import DownloadFailed, RetryPolicy, download, exclusive, read_url_bytes
from tests.misbehaving_server import MisbehavingServer, Reply, misbehaving_server

BODY = random.Random(7).randbytes(300_000)
SHA256 = hashlib.sha256(BODY).hexdigest()
HALF = 150_000
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass
class Sleeper:
    """Takes the place of time.sleep: writes the waits down and does not wait."""

    waits_s: list[float] = field(default_factory=list)

    def __call__(self, seconds: float) -> None:
        self.waits_s.append(seconds)


@pytest.fixture
def server() -> Iterator[MisbehavingServer]:
    with misbehaving_server() as running:
        yield running


@pytest.fixture
def sleeper() -> Sleeper:
    return Sleeper()


@pytest.fixture
def policy(sleeper: Sleeper) -> RetryPolicy:
    return RetryPolicy(tries=4, read_timeout_s=5.0, jitter_seed=1, sleep=sleeper)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out" / "file.bin"


def left_beside(target: Path) -> list[str]:
    """What stands in the target's folder, apart from the target."""
    return sorted(path.name for path in target.parent.iterdir() if path != target)


def test_one_request_when_all_is_well(
    server: MisbehavingServer, target: Path, policy: RetryPolicy
) -> None:
    seen: list[tuple[int, int | None]] = []
    url = server.script("/f", Reply(BODY))
    download(
        url,
        target,
        sha256=SHA256,
        size_bytes=len(BODY),
        policy=policy,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert target.read_bytes() == BODY
    assert left_beside(target) == []
    assert server.ranges == [None]
    assert server.requests[0].headers["accept-encoding"] == "identity"
    assert seen[0] == (0, len(BODY))
    assert seen[-1] == (len(BODY), len(BODY))
    assert seen == sorted(seen)


def test_empty_file(server: MisbehavingServer, target: Path, policy: RetryPolicy) -> None:
    download(server.script("/f", Reply(b"")), target, policy=policy)
    assert target.read_bytes() == b""
    assert left_beside(target) == []


def test_replaces_what_stands_there(
    server: MisbehavingServer, target: Path, policy: RetryPolicy
) -> None:
    target.parent.mkdir()
    target.write_bytes(b"old")
    download(server.script("/f", Reply(BODY)), target, policy=policy)
    assert target.read_bytes() == BODY


def test_503_twice_then_fine(
    server: MisbehavingServer, target: Path, policy: RetryPolicy, sleeper: Sleeper
) -> None:
    url = server.script("/f", Reply(status=503), Reply(status=503), Reply(BODY))
    download(url, target, policy=policy)
    assert target.read_bytes() == BODY
    assert server.ranges == [None, None, None]
    assert len(sleeper.waits_s) == 2
    assert 0.5 <= sleeper.waits_s[0] <= 1.0 <= sleeper.waits_s[1] <= 2.0


def test_waits_are_the_same_for_the_same_seed(
    server: MisbehavingServer, target: Path, policy: RetryPolicy, sleeper: Sleeper
) -> None:
    url = server.script("/f", Reply(status=500))
    for _ in range(2):
        with pytest.raises(DownloadFailed, match=r"500 Internal Server Error \(4 tries\)"):
            download(url, target, policy=policy)
    assert len(server.requests) == 8
    assert sleeper.waits_s[:3] == sleeper.waits_s[3:]
    assert len(set(sleeper.waits_s)) == 3


def test_429_obeys_retry_after_up_to_the_cap(
    server: MisbehavingServer, target: Path, policy: RetryPolicy, sleeper: Sleeper
) -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=100))
    replies = [Reply(status=429, headers={"Retry-After": text}) for text in ("7", "9999", date)]
    url = server.script("/f", *replies, Reply(BODY))
    download(url, target, policy=policy)
    assert target.read_bytes() == BODY
    assert sleeper.waits_s[:2] == [7.0, 300.0]
    assert 90 < sleeper.waits_s[2] <= 100


@pytest.mark.parametrize("text", ["soon", "-5", "", "1e9", "٧"])
def test_unreadable_retry_after_is_ignored(
    server: MisbehavingServer, target: Path, policy: RetryPolicy, sleeper: Sleeper, text: str
) -> None:
    header = text.encode().decode("latin-1")
    url = server.script("/f", Reply(status=429, headers={"Retry-After": header}), Reply(BODY))
    download(url, target, policy=policy)
    assert target.read_bytes() == BODY
    assert [0.5 <= wait <= 1.0 for wait in sleeper.waits_s] == [True]


def test_cut_body_is_resumed_from_where_it_ended(
    server: MisbehavingServer, target: Path, policy: RetryPolicy
) -> None:
    url = server.script("/f", Reply(BODY, cut_after_bytes=HALF), Reply(BODY))
    download(url, target, sha256=SHA256, policy=policy)
    assert target.read_bytes() == BODY
    assert server.ranges == [None, f"bytes={HALF}-"]
    assert server.requests[1].if_range is not None
    assert server.requests[1].if_range.startswith('"')


def test_resumes_by_date_when_the_etag_is_weak(
    server: MisbehavingServer, target: Path, policy: RetryPolicy
) -> None:
    date = "Wed, 01 Jan 2025 00:00:00 GMT"
    reply = Reply(BODY, etag='W/"1"', headers={"Last-Modified": date})
    url = server.script("/f", replace(reply, cut_after_bytes=HALF), reply)
    download(url, target, policy=policy)
    assert target.read_bytes() == BODY
    assert [request.if_range for request in server.requests] == [None, date]


def test_no_validator_no_resume(
    server: MisbehavingServer, target: Path, policy: RetryPolicy
) -> None:
    reply = Reply(BODY, etag=None)
    url = server.script("/f", replace(reply, cut_after_bytes=HALF), reply)
    download(url, target, policy=policy)
    assert target.read_bytes() == BODY
    assert server.ranges == [None, None]


@pytest.mark.parametrize("honours_if_range", [True, False])
def test_changed_file_starts_again(
    server: MisbehavingServer, target: Path, policy: RetryPolicy, honours_if_range: bool
) -> None:
    changed = BODY[::-1]
    new = Reply(changed, honours_if_range=honours_if_range)
    url = server.script("/f", Reply(BODY, cut_after_bytes=HALF), new)
    download(url, target, policy=policy)
    assert target.read_bytes() == changed
    # A server that sends a range of the new file all the same is caught by its ETag.
    again = [] if honours_if_range else [None]
    assert server.ranges == [None, f"bytes={HALF}-", *again]


def test_server_that_ignores_range_starts_again(
    server: MisbehavingServer, target: Path, policy: RetryPolicy
) -> None:
    reply = Reply(BODY, honours_range=False)
    url = server.script("/f", replace(reply, cut_after_bytes=HALF), reply)
    download(url, target, sha256=SHA256, policy=policy)
    assert target.read_bytes() == BODY
    assert server.ranges == [None, f"bytes={HALF}-"]


def test_416_on_a_file_that_shrank_starts_again(
    server: MisbehavingServer, target: Path, policy: RetryPolicy
) -> None:
    short = Reply(BODY[:1000], honours_if_range=False)
    url = server.script("/f", Reply(BODY, cut_after_bytes=HALF), short)
    download(url, target, policy=policy)
    assert target.read_bytes() == BODY[:1000]
    assert server.ranges == [None, f"bytes={HALF}-", None]


def test_416_at_the_very_end_means_whole(
    server: MisbehavingServer, target: Path, policy: RetryPolicy
) -> None:
    """Chunked, all bytes there, but the end mark is cut off: nothing is sent a second time."""
    cut = Reply(BODY, chunked=True, cut_after_bytes=len(BODY))
    url = server.script("/f", cut, Reply(BODY))
    download(url, target, sha256=SHA256, policy=policy)
    assert target.read_bytes() == BODY
    assert server.ranges == [None, f"bytes={len(BODY)}-"]


def test_chunked_body_without_length(
    server: MisbehavingServer, target: Path, policy: RetryPolicy
) -> None:
    reply = Reply(BODY, chunked=True, drip=(50_000, 0.0))
    url = server.script("/f", replace(reply, cut_after_bytes=HALF), reply)
    download(url, target, sha256=SHA256, policy=policy)
    assert target.read_bytes() == BODY
    assert server.ranges == [None, f"bytes={HALF}-"]


def test_stored_as_sent_when_the_server_says_gzip(
    server: MisbehavingServer, target: Path, policy: RetryPolicy
) -> None:
    url = server.script("/f", Reply(BODY, headers={"Content-Encoding": "gzip"}))
    download(url, target, sha256=SHA256, policy=policy)
    assert target.read_bytes() == BODY
    assert read_url_bytes(url, len(BODY), policy) == BODY


def test_slow_drip_is_given_up(
    server: MisbehavingServer, target: Path, policy: RetryPolicy
) -> None:
    """Each byte comes well inside the read time-out, the file never would."""
    impatient = replace(policy, tries=2, slow_window_s=0.1, slow_window_bytes=1000)
    url = server.script("/f", Reply(BODY, drip=(10, 0.02)))
    started = time.monotonic()
    with pytest.raises(DownloadFailed, match=r"only \d+ bytes came in 0 s \(2 tries\)") as caught:
        download(url, target, policy=impatient)
    assert time.monotonic() - started < 3
    assert not caught.value.permanent
    assert not target.exists()
    assert server.ranges[0] is None
    assert server.ranges[1] is not None


def test_drip_that_is_fast_enough_passes(
    server: MisbehavingServer, target: Path, policy: RetryPolicy
) -> None:
    patient = replace(policy, slow_window_s=0.2, slow_window_bytes=200)
    url = server.script("/f", Reply(BODY, drip=(10_000, 0.02)))
    download(url, target, policy=patient)
    assert target.read_bytes() == BODY
    assert server.ranges == [None]


def test_endless_body_meets_the_deadline(
    server: MisbehavingServer, target: Path, policy: RetryPolicy
) -> None:
    hasty = replace(policy, deadline_s=0.3)
    url = server.script("/f", Reply(BODY * 30, drip=(1000, 0.01), chunked=True))
    started = time.monotonic()
    with pytest.raises(DownloadFailed, match=r"no time is left after 0 s \(1 try\)"):
        download(url, target, policy=hasty)
    assert time.monotonic() - started < 3
    assert not target.exists()


def test_endless_body_meets_the_size_limit(
    server: MisbehavingServer, target: Path, policy: RetryPolicy
) -> None:
    url = server.script("/f", Reply(BODY, chunked=True))
    with pytest.raises(DownloadFailed, match=r"larger than 1000 bytes \(1 try\)"):
        download(url, target, policy=replace(policy, largest_bytes=1000))
    assert left_beside(target) == []
    with pytest.raises(DownloadFailed, match=r"larger than 299999 bytes \(1 try\)"):
        download(url, target, size_bytes=299_999, policy=policy)
    assert left_beside(target) == []
    with pytest.raises(DownloadFailed, match=r"larger than 2000 bytes \(1 try\)"):
        read_url_bytes(url, 2000, policy)


def test_silent_server_meets_the_read_time_out(
    server: MisbehavingServer, target: Path, policy: RetryPolicy
) -> None:
    url = server.script("/f", Reply(BODY, silent_s=30.0), Reply(BODY))
    started = time.monotonic()
    download(url, target, policy=replace(policy, read_timeout_s=0.2))
    assert time.monotonic() - started < 3
    assert target.read_bytes() == BODY
    assert len(server.requests) == 2


def test_silence_in_the_middle_of_the_body(
    server: MisbehavingServer, target: Path, policy: RetryPolicy
) -> None:
    url = server.script("/f", Reply(BODY, drip=(HALF, 3.0)), Reply(BODY))
    started = time.monotonic()
    download(url, target, policy=replace(policy, read_timeout_s=0.2))
    assert time.monotonic() - started < 2
    assert target.read_bytes() == BODY
    assert server.ranges == [None, f"bytes={HALF}-"]


def test_length_that_is_too_long(
    server: MisbehavingServer, target: Path, policy: RetryPolicy
) -> None:
    false = Reply(BODY, declared_bytes=len(BODY) + 5, honours_range=False)
    with pytest.raises(DownloadFailed, match=r"300000 bytes read, 5 more.*\(4 tries\)"):
        download(server.script("/f", false), target, policy=policy)
    assert not target.exists()
    # Asked for the rest, this one owns up: 416, the file has 300,000 bytes.
    download(server.script("/g", replace(false, honours_range=True)), target, policy=policy)
    assert target.read_bytes() == BODY
    assert server.ranges == [None, *["bytes=300000-"] * 3, None, "bytes=300000-"]


def test_length_that_is_too_short(
    server: MisbehavingServer, target: Path, policy: RetryPolicy
) -> None:
    """HTTP itself cannot see it; the size, or the digest, of the registry does."""
    url = server.script("/f", Reply(BODY, declared_bytes=1000))
    with pytest.raises(DownloadFailed, match=r"1000 bytes, expected 300000 \(1 try\)") as caught:
        download(url, target, size_bytes=len(BODY), policy=policy)
    assert caught.value.permanent
    with pytest.raises(DownloadFailed, match="SHA-256"):
        download(url, target, sha256=SHA256, policy=policy)
    assert not target.exists()
    assert left_beside(target) == []


def test_no_length_at_all_and_cut(
    server: MisbehavingServer, target: Path, policy: RetryPolicy
) -> None:
    reply = Reply(BODY, declared_bytes=-1)
    url = server.script("/f", replace(reply, cut_after_bytes=HALF), reply)
    download(url, target, size_bytes=len(BODY), policy=policy)
    assert target.read_bytes() == BODY
    assert server.ranges == [None, f"bytes={HALF}-"]


@pytest.mark.parametrize("status", [400, 403, 404, 410, 204])
def test_lasting_statuses_are_not_retried(
    server: MisbehavingServer, target: Path, policy: RetryPolicy, sleeper: Sleeper, status: int
) -> None:
    url = server.script("/f", Reply(status=status))
    with pytest.raises(DownloadFailed, match=rf"could not download '{url}'.*{status}") as caught:
        download(url, target, policy=policy)
    assert caught.value.permanent
    assert (caught.value.url, caught.value.tries) == (url, 1)
    assert len(server.requests) == 1
    assert sleeper.waits_s == []
    assert left_beside(target) == []


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/x", "http://", "no-scheme", "http://[1"])
def test_malformed_urls_are_not_retried(target: Path, policy: RetryPolicy, url: str) -> None:
    with pytest.raises(DownloadFailed, match=r"\(1 try\)"):
        download(url, target, policy=policy)


def test_refused_connection_is_retried_and_named(target: Path, policy: RetryPolicy) -> None:
    with misbehaving_server() as closed:
        url = closed.base + "/f"
    with pytest.raises(DownloadFailed, match=r"refused.*\(4 tries\)") as caught:
        download(url, target, policy=policy)
    assert not caught.value.permanent


def test_wrong_digest_names_both_and_removes_the_bytes(
    server: MisbehavingServer, target: Path, policy: RetryPolicy
) -> None:
    url = server.script("/f", Reply(BODY))
    with pytest.raises(DownloadFailed, match=f"{SHA256}, expected {'0' * 64}") as caught:
        download(url, target, sha256="0" * 64, policy=policy)
    assert caught.value.permanent
    assert len(server.requests) == 1
    assert not target.exists()
    assert left_beside(target) == []


def test_each_mebibyte_of_progress_buys_new_tries(
    server: MisbehavingServer, target: Path, policy: RetryPolicy
) -> None:
    """Ten cuts, three tries: fine when each brings enough, given up when none does."""
    reply = Reply(BODY, cut_after_bytes=len(BODY) // 10)
    frugal = replace(policy, tries=3, progress_bytes=len(BODY) // 10)
    download(server.script("/f", reply), target, sha256=SHA256, policy=frugal)
    assert target.read_bytes() == BODY
    assert len(server.requests) == 10
    with pytest.raises(DownloadFailed, match=r"\(3 tries\)"):
        download(server.script("/g", reply), target, policy=replace(frugal, progress_bytes=1 << 20))


def test_restarts_from_zero_do_not_count_as_progress(
    server: MisbehavingServer, target: Path, policy: RetryPolicy
) -> None:
    reply = Reply(BODY, cut_after_bytes=HALF, honours_range=False)
    frugal = replace(policy, progress_bytes=1000)
    with pytest.raises(DownloadFailed, match=r"the body ended|IncompleteRead") as caught:
        download(server.script("/f", reply), target, policy=frugal)
    assert caught.value.tries == frugal.tries


def test_killed_process_leaves_no_final_file_and_the_next_call_resumes(
    server: MisbehavingServer, target: Path, policy: RetryPolicy
) -> None:
    url = server.script("/f", Reply(BODY, drip=(HALF, 30.0)), Reply(BODY))
    code = (
        "import sys; from pathlib import Path; from models.fetch import download; "
        "download(sys.argv[1], Path(sys.argv[2]))"
    )
    child = subprocess.Popen([sys.executable, "-c", code, url, str(target)], cwd=REPOSITORY)
    part = target.with_name(f".{target.name}.gristmill-part")
    end = time.monotonic() + 30
    while not (part.exists() and part.stat().st_size >= HALF - 65536):
        assert time.monotonic() < end
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert not target.exists()
    have = part.stat().st_size
    assert 0 < have <= HALF
    download(url, target, sha256=SHA256, policy=policy)
    assert target.read_bytes() == BODY
    assert server.ranges == [None, f"bytes={have}-"]
    assert left_beside(target) == []


def test_whole_part_of_a_dead_process_is_taken_without_a_request(
    server: MisbehavingServer, target: Path, policy: RetryPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.script("/f", Reply(BODY))

    def die(descriptor: int) -> None:
        if target.with_name(f".{target.name}.gristmill-part").exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("models.fetch.os.fsync", die)
        download(url, target, policy=policy)
    assert not target.exists()
    download(url, target, sha256=SHA256, policy=policy)
    assert target.read_bytes() == BODY
    assert len(server.requests) == 1


def test_part_of_another_url_is_not_used(
    server: MisbehavingServer, target: Path, policy: RetryPolicy
) -> None:
    first = server.script("/f", Reply(BODY, cut_after_bytes=HALF))
    with pytest.raises(DownloadFailed):
        download(first, target, policy=replace(policy, tries=1))
    second = server.script("/g", Reply(BODY[::-1], etag='"x"'))
    download(second, target, policy=policy)
    assert target.read_bytes() == BODY[::-1]
    assert server.ranges == [None, None]


@pytest.mark.parametrize("note", ["", "{", "[]", '{"url": 5}', None])
def test_unreadable_note_starts_again(
    server: MisbehavingServer, target: Path, policy: RetryPolicy, note: str | None
) -> None:
    target.parent.mkdir()
    target.with_name(f".{target.name}.gristmill-part").write_bytes(b"rubbish")
    if note is not None:
        target.with_name(f".{target.name}.gristmill-part.json").write_text(note)
    download(server.script("/f", Reply(BODY)), target, policy=policy)
    assert target.read_bytes() == BODY
    assert server.ranges == [None]


def test_two_at_once_download_once(server: MisbehavingServer, target: Path) -> None:
    url = server.script("/f", Reply(BODY, drip=(30_000, 0.02)))
    threads = [
        threading.Thread(target=download, args=(url, target), kwargs={"sha256": SHA256})
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target.read_bytes() == BODY
    assert len(server.requests) == 1
    assert left_beside(target) == []


def test_lock_keeps_others_out_and_goes_away(tmp_path: Path) -> None:
    path = tmp_path / "thing"
    inside = 0
    most = 0
    guard = threading.Lock()

    def work() -> None:
        nonlocal inside, most
        for _ in range(5):
            with exclusive(path, RetryPolicy(sleep=lambda seconds: time.sleep(0.001))):
                with guard:
                    inside += 1
                    most = max(most, inside)
                time.sleep(0.001)
                with guard:
                    inside -= 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_said_before_the_body_is_read(
    server: MisbehavingServer, target: Path, policy: RetryPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("models.fetch.shutil.disk_usage", lambda path: usage)
    with pytest.raises(UserError, match="1000 bytes free and 300000 more are needed"):
        download(server.script("/f", Reply(BODY)), target, policy=policy)
    assert not target.exists()


def test_read_url_bytes_retries_and_checks_the_length(
    server: MisbehavingServer, policy: RetryPolicy
) -> None:
    url = server.script("/f", Reply(status=503), Reply(BODY, cut_after_bytes=HALF), Reply(BODY))
    assert read_url_bytes(url, len(BODY), policy) == BODY
    assert server.ranges == [None, None, None]


def test_redirect_away_from_https_is_refused() -> None:
    """The check itself: the answer's URL is what requests ended at."""
    from models.http_get import WillNotPass, get

    class Session:
        def get(self, url: str, **options: object) -> object:
            return self

        url = "http://127.0.0.1/f"

        def __enter__(self) -> Session:
            return self

        def __exit__(self, *error: object) -> None:
            pass

    with (
        pytest.raises(WillNotPass, match=r"leads from https to .http://127\.0\.0\.1/f"),
        get(Session(), "https://127.0.0.1/f", {}, RetryPolicy()),  # type: ignore[arg-type]
    ):
        pass
