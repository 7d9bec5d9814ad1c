"""Remote files through fsspec: one way to connect, one rule for trying again, plain errors.

Who tries again: the S3 client does for each request (throttling, 5xx, refused or reset
connections; waits that double, with jitter), and so does gcsfs. What no client can see from one
request is tried again here: a body that stops, stalls or is shorter than the store says, and all
failures of clients that never try again (https). A failure that a client has given up on is not
tried again here, so that tries do not multiply. Missing files, missing rights and wrong requests
are answered at once.

Directory listings are never cached: other processes write to the same folders.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

import fsspec

from models.errors import UserError

_WAITS_S = (1.0, 4.0, 16.0)
"""Between our tries, before jitter."""
_S3_TRIES_PER_REQUEST = 6  # waits of 1, 2, 4, 8, 16 s at most, half of that on average
_S3_PART_BYTES = 16 << 20
_S3_PARTS_AT_ONCE = 4
_HTTP_CONNECT_S = 30.0
_HTTP_STALL_S = 60.0
_TRANSFER_ERRORS = frozenset({"BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch",
                              "NoSuchUpload", "RequestTimeout"})  # fmt: skip
"""Codes of S3 for a request that came damaged, or whose answer was lost."""
_BODY_ERRORS = frozenset({"AioReadTimeoutError", "IncompleteReadError", "ResponseStreamingError"})
"""Errors of botocore after the answer's head, where botocore itself does not try again."""
_ERRNO_OF = {"FileNotFoundError": errno.ENOENT, "PermissionError": errno.EACCES,
             "IsADirectoryError": errno.EISDIR, "FileExistsError": errno.EEXIST,
             "TimeoutError": errno.ETIMEDOUT, "FSTimeoutError": errno.ETIMEDOUT}  # fmt: skip

T = TypeVar("T")


class RemoteRefused(UserError, OSError):
    """A store that does not let us in: no credentials, no right, no such bucket.

    Built with an errno, the reason, and the URL. It is the user's mistake while a run is
    planned, and one file's failure while it goes on.
    """

    def __str__(self) -> str:
        return f"'{self.filename}' cannot be used: {self.strerror}"


def connect(url: str | os.PathLike[str]) -> tuple[Any, str]:
    """The fsspec file system of `url`, and the path inside it.

    Raises UserError when no file system is known or installed for the scheme.
    """
    text = os.fspath(url)
    s3 = text.startswith(("s3://", "s3a://"))
    try:
        options = _s3_options() if s3 else {}
        if text.startswith(("http://", "https://")):
            options = _http_options(text.split(":", 1)[0])
        system, path = fsspec.core.url_to_fs(text, **options)
    except ImportError as error:
        advice = ": pip install 'gristmill[s3]'" if s3 else ""
        raise UserError(f"'{text}' cannot be opened: {error}{advice}") from None
    except ValueError as error:
        raise UserError(f"'{text}' cannot be opened: {error}") from None
    if s3:
        system.retries = 1  # botocore tries again, see _s3_options
    if hasattr(system, "dircache"):
        system.dircache.use_listings_cache = False
        system.dircache.clear()
    return system, str(path)


def _s3_options() -> dict[str, Any]:
    """Our settings where the user's (fsspec's configuration, AWS_*) say nothing else."""
    given = {**fsspec.config.conf.get("s3a", {}), **fsspec.config.conf.get("s3", {})}
    client = dict(given.get("config_kwargs", {}))
    if not {"AWS_MAX_ATTEMPTS", "AWS_RETRY_MODE"} & os.environ.keys():
        retries = {"mode": "standard", "total_max_attempts": _S3_TRIES_PER_REQUEST}
        client.setdefault("retries", retries)
    # One stream for each download: s3fs would fill a file with zeros where a parallel part is
    # short, and every worker is busy with its own file anyway.
    return {"config_kwargs": client, "max_concurrency": given.get("max_concurrency", 1)}


def _http_options(scheme: str) -> dict[str, Any]:
    """A limit on waiting for bytes, where aiohttp has one of 5 minutes on the whole transfer."""
    import aiohttp  # noqa: PLC0415  (only where a web server is asked)

    client = dict(fsspec.config.conf.get(scheme, {}).get("client_kwargs", {}))
    limits = aiohttp.ClientTimeout(
        total=None, sock_connect=_HTTP_CONNECT_S, sock_read=_HTTP_STALL_S
    )
    client.setdefault("timeout", limits)
    return {"client_kwargs": client}


def call(url: str | os.PathLike[str], action: Callable[[], T]) -> T:
    """What `action` gives; it is run again after a passing failure, 4 times in all at most.

    `action` must give the same when it is run twice. Raises OSError with `url` as its filename;
    FileNotFoundError when nothing is there, RemoteRefused when the store does not let us in.
    """
    for wait_s in (*_WAITS_S, None):
        try:
            return action()
        except Exception as error:  # each file system has errors of its own
            if wait_s is None or not _passes(error):
                raise _as_os_error(error, os.fspath(url)) from error
            time.sleep(wait_s * random.uniform(0.5, 1.0))
    raise AssertionError  # the last try returns or raises


def state(url: str | os.PathLike[str]) -> dict[str, Any]:
    """What the store says of `url`: fsspec's info, with "type" and "size". Raises OSError."""
    system, path = connect(url)
    return dict(call(url, lambda: system.info(path)))


def download(url: str | os.PathLike[str], target: str) -> None:
    """Copy the file at `url` to the local path `target`. Raises OSError."""
    system, path = connect(url)

    def once() -> None:
        expected = _stated_bytes(system, path)
        system.get_file(path, target)
        _check_length(os.stat(target).st_size, expected)  # noqa: PTH116

    call(url, once)


def read(url: str | os.PathLike[str], start: int = 0, stop: int | None = None) -> bytes:
    """Bytes `start:stop` of the file at `url`, all of it without them. Raises OSError."""
    system, path = connect(url)

    def once() -> bytes:
        if stop is None:
            expected = _stated_bytes(system, path)
            data = bytes(system.cat_file(path))
        else:
            expected = stop - start
            data = bytes(system.cat_file(path, start=start, end=stop))
        _check_length(len(data), expected)
        return data

    return call(url, once) if stop is None or stop > start else b""


def upload(source: str, url: str | os.PathLike[str]) -> None:
    """Make the local file `source` the file at `url`, which appears whole or not at all.

    Raises OSError, also when the store states another size afterwards.
    """
    system, path = connect(url)
    options: dict[str, Any] = {}
    if _is_s3(system):
        options = {"chunksize": _S3_PART_BYTES, "max_concurrency": _S3_PARTS_AT_ONCE}

    def once() -> None:
        system.put_file(source, path, **options)
        found = _stated_bytes(system, path)
        if found is not None:
            _check_length(found, os.stat(source).st_size)  # noqa: PTH116

    call(url, once)


def remove(url: str | os.PathLike[str]) -> None:
    """Remove one file; nothing happens when it is not there."""
    system, path = connect(url)
    with contextlib.suppress(FileNotFoundError):
        call(url, lambda: system.rm_file(path))


def remove_tree(url: str | os.PathLike[str]) -> None:
    """Remove the folder `url` and all in it; nothing happens when it is not there.

    Raises OSError when something stays: an object store answers a batch of deletions with
    success even where it refuses some, and s3fs says nothing of them.
    """
    system, path = connect(url)

    def once() -> None:
        if system.exists(path):
            with contextlib.suppress(FileNotFoundError):  # another command removes it too
                system.rm(path, recursive=True)
            if system.exists(path):
                raise OSError(errno.ENOTEMPTY, "some files could not be removed")

    call(url, once)


def protocols(system: Any) -> tuple[str, ...]:
    """The schemes that an fsspec file system is known by."""
    return (system.protocol,) if isinstance(system.protocol, str) else tuple(system.protocol)


def _is_s3(system: Any) -> bool:
    return "s3" in protocols(system)


def _stated_bytes(system: Any, path: str) -> int | None:
    """Size that a store states for `path`; None from a web server.

    A web server may state another size for HEAD than for GET, or none; the HTTP client checks
    the length of the answer itself.
    """
    if "http" in protocols(system):
        return None
    info = system.info(path)
    if info["type"] == "directory":
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return None if info["size"] is None else int(info["size"])


def _check_length(found: int, expected: int | None) -> None:
    if expected is not None and found != expected:
        raise OSError(errno.EIO, f"{found:,} of {expected:,} bytes came through")


def _passes(error: Exception) -> bool:
    """Whether a failure may pass, and no client has tried again already."""
    answer = _s3_answer(error)
    if answer is not None:
        code, http_status, tried_again = answer
        return code in _TRANSFER_ERRORS or (http_status >= 500 and not tried_again)
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "BotoCoreError" in kinds:
        return type(error).__name__ in _BODY_ERRORS
    if type(error).__module__.startswith("gcsfs"):
        return False
    status = getattr(error, "status", None)  # of aiohttp
    if isinstance(status, int) and 400 <= status < 500:
        return status in (408, 425, 429)
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):  # of this machine's disk
        return False
    return not isinstance(error, (FileNotFoundError, PermissionError, IsADirectoryError,
                                  NotADirectoryError, FileExistsError, UserError, ValueError,
                                  TypeError, NotImplementedError))  # fmt: skip


def _s3_answer(error: BaseException) -> tuple[str, int, bool] | None:
    """Code, HTTP status and whether the client tried more than once; None: no answer of S3."""
    response = getattr(error.__cause__, "response", None)
    if not isinstance(response, dict) or "Error" not in response:
        return None
    about = response.get("ResponseMetadata", {})
    tried_again = about.get("RetryAttempts", 0) > 0
    return str(response["Error"].get("Code")), int(about.get("HTTPStatusCode", 0)), tried_again


def _as_os_error(error: Exception, url: str) -> OSError:
    """`error` as the OSError that it means, naming `url`."""
    if isinstance(error, RemoteRefused):
        return error
    refusal = _refusal(error)
    if refusal is not None:
        return RemoteRefused(*refusal, url)
    kind = type(error).__name__
    if isinstance(error, OSError):
        number = error.errno or _ERRNO_OF.get(kind, errno.EIO)
        return OSError(number, error.strerror or str(error) or kind, error.filename or url)
    return OSError(errno.EIO, f"{kind}: {error}", url)


def _refusal(error: Exception) -> tuple[int, str] | None:
    """Errno and reason where a store does not let us in."""
    kind = type(error).__name__
    if kind in {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"}:
        return errno.EACCES, (
            f"no credentials ({error}): set AWS_PROFILE, or AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or FSSPEC_S3_ANON=true for a public bucket"
        )
    answer = _s3_answer(error)
    if answer is not None and answer[0] == "NoSuchBucket":
        return errno.ENOENT, (
            "no such bucket: create it, or repair its name or the endpoint (AWS_ENDPOINT_URL)"
        )
    if answer is not None and isinstance(error, PermissionError):
        return errno.EACCES, (
            f"access denied ({answer[0]}): use credentials that may list, read and write there"
        )
    return None
