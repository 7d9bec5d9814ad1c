"""HTTP GET that is patient within bounds: time-outs, retries with growing waits, plain reasons.

A failure either may pass (MayPass: 429, 5xx, a cut line, silence, a drip) and is tried again, or
will not (WillNotPass: 404, a malformed URL) and is not. `models.fetch` builds downloads on it.

Left out on purpose: a guard against a server that drips its response headers (each read is
limited by the read time-out, their sum is not).
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import requests
import urllib3

from models.errors import Fault

_BLOCK_BYTES = 1 << 16
_PASSING_STATUS = frozenset({408, 425, 429})
_LASTING_ERRORS = (
    requests.exceptions.InvalidURL,
    requests.exceptions.MissingSchema,
    requests.exceptions.InvalidSchema,
    requests.exceptions.TooManyRedirects,
)


@dataclass(frozen=True)
class RetryPolicy:
    """How patient a download is.

    `tries` in a row may fail without progress. One that leaves the file at least `progress_bytes`
    longer than ever before starts the count anew: a large file over a bad line takes many tries,
    and each pays. The waits double from `first_wait_s` to `longest_wait_s`, less a random share of
    up to half; Retry-After is obeyed up to `longest_retry_after_s`. A body that brings fewer than
    `slow_window_bytes` in `slow_window_s` counts as a failed try. `deadline_s` ends it all;
    `largest_bytes` limits a body of unknown length. `sleep` and `clock` are replaced in tests.
    """

    tries: int = 6
    progress_bytes: int = 1 << 20
    connect_timeout_s: float = 15.0
    read_timeout_s: float = 60.0
    first_wait_s: float = 1.0
    longest_wait_s: float = 60.0
    longest_retry_after_s: float = 300.0
    slow_window_s: float = 60.0
    slow_window_bytes: int = 1 << 16
    deadline_s: float = 24 * 3600.0
    largest_bytes: int = 64 << 30
    jitter_seed: int | None = None
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic


class DownloadFailed(Fault):
    """A download was given up. `permanent`: another try would end in the same way."""

    def __init__(self, url: str, reason: str, tries: int, *, permanent: bool) -> None:
        times = "1 try" if tries == 1 else f"{tries} tries"
        super().__init__(f"could not download '{url}': {reason} ({times})")
        self.url = url
        self.reason = reason
        self.tries = tries
        self.permanent = permanent


class MayPass(Exception):
    """This try failed, another may not; the server asked for at least `wait_s` before it."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class WillNotPass(Exception):
    """Every further try would fail in the same way."""


def read_url_bytes(url: str, max_bytes: int, policy: RetryPolicy | None = None) -> bytes:
    """The body at `url`, at most `max_bytes` of it, in memory. Raises DownloadFailed."""
    policy = policy or RetryPolicy()
    deadline = policy.clock() + policy.deadline_s
    body = bytearray()

    def attempt() -> None:
        body.clear()
        with get(session, url, {}, policy) as response:
            expect_status(response, 200)
            total = content_length(response)
            for block in body_blocks(response, policy, deadline):
                body.extend(block)
                if len(body) > max_bytes:
                    raise WillNotPass(f"it is larger than {max_bytes} bytes")
            if total is not None and len(body) < total:
                raise MayPass(f"the body ended at byte {len(body)} of {total}")

    with requests.Session() as session:
        retry(url, policy, deadline, attempt, lambda: 0)
    return bytes(body)


def retry(
    url: str,
    policy: RetryPolicy,
    deadline: float,
    attempt: Callable[[], None],
    position: Callable[[], int],
) -> int:
    """Call `attempt` until it ends well; the number of tries.

    `attempt` raises MayPass or WillNotPass, `position` is the bytes at hand, `deadline` is a time
    of `policy.clock`. Raises DownloadFailed.
    """
    draw = random.Random(policy.jitter_seed)
    furthest = position()
    tries = in_vain = 0
    while True:
        tries += 1
        try:
            attempt()
            return tries
        except WillNotPass as error:
            raise DownloadFailed(url, str(error), tries, permanent=True) from error
        except MayPass as error:
            failure = error
        in_vain += 1
        if position() >= furthest + policy.progress_bytes:
            furthest = position()
            in_vain = 1
        if in_vain >= policy.tries:
            raise DownloadFailed(url, str(failure), tries, permanent=False) from failure
        backoff = min(policy.longest_wait_s, policy.first_wait_s * 2.0 ** (in_vain - 1))
        wait = max(
            backoff * draw.uniform(0.5, 1.0), min(failure.wait_s, policy.longest_retry_after_s)
        )
        if policy.clock() + wait >= deadline:
            reason = f"{failure}; no time is left after {policy.deadline_s:.0f} s"
            raise DownloadFailed(url, reason, tries, permanent=False) from failure
        policy.sleep(wait)


@contextlib.contextmanager
def get(
    session: requests.Session, url: str, headers: dict[str, str], policy: RetryPolicy
) -> Iterator[requests.Response]:
    """The answer to one GET, its body not yet read. Raises MayPass, WillNotPass."""
    sent = {"User-Agent": "gristmill", "Accept-Encoding": "identity", **headers}
    timeout = (policy.connect_timeout_s, policy.read_timeout_s)
    try:
        response = session.get(url, headers=sent, stream=True, timeout=timeout)
    except _LASTING_ERRORS as error:
        raise WillNotPass(_plain(error)) from error
    except requests.RequestException as error:
        raise MayPass(_plain(error)) from error
    with response:
        if url.lower().startswith("https:") and not response.url.lower().startswith("https:"):
            raise WillNotPass(f"the server leads from https to '{response.url}'")
        yield response


def body_blocks(
    response: requests.Response, policy: RetryPolicy, deadline: float
) -> Iterator[bytes]:
    """The body as sent, in the pieces in which it arrives.

    `read1` returns after one read of the socket, so the clock is looked at often even when the
    bytes drip one by one, each just inside the read time-out. Raises MayPass.
    """
    window_start, window_bytes = policy.clock(), 0
    while True:
        try:
            block = response.raw.read1(_BLOCK_BYTES, decode_content=False)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise MayPass(_plain(error)) from error
        if not block:
            return
        yield block
        now = policy.clock()
        window_bytes += len(block)
        if now >= deadline:
            raise MayPass(f"it was not complete after {policy.deadline_s:.0f} s")
        if now - window_start >= policy.slow_window_s:
            if window_bytes < policy.slow_window_bytes:
                raise MayPass(f"only {window_bytes} bytes came in {now - window_start:.0f} s")
            window_start, window_bytes = now, 0


def expect_status(response: requests.Response, status: int) -> None:
    """Raise MayPass or WillNotPass when the answer has another status."""
    code = response.status_code
    if code == status:
        return
    reason = f"the server answered {code} {response.reason or ''}".rstrip()
    if code in _PASSING_STATUS or code >= 500:
        raise MayPass(reason, _retry_after_s(response))
    raise WillNotPass(reason)


def _retry_after_s(response: requests.Response) -> float:
    text = response.headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        when = parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())


def content_length(response: requests.Response) -> int | None:
    """The body's bytes on the wire, None when the server does not say."""
    text = response.headers.get("Content-Length", "")
    chunked = "chunked" in response.headers.get("Transfer-Encoding", "").lower()
    return int(text) if text.isascii() and text.isdigit() and not chunked else None


def content_range(response: requests.Response) -> tuple[int | None, int | None]:
    """First byte and total of `Content-Range: bytes 5-9/10` (416: `bytes */10`)."""
    span, _, total = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
    start = span.partition("-")[0].strip()
    return (
        int(start) if start.isascii() and start.isdigit() else None,
        int(total) if total.isascii() and total.isdigit() else None,
    )


def _plain(error: Exception) -> str:
    """The innermost reason: requests and urllib3 wrap the operating system's words in theirs."""
    inner = error.args[0] if error.args else error
    reason = getattr(inner, "reason", None) or inner
    return f"{type(error).__name__}: {reason}"[:300]
