"""Which WET files a crawl consists of: a snapshot's list, resolved into a crawl manifest.

A source is a Common Crawl snapshot (`CC-MAIN-2024-10`) or any list of WET paths, one a line, plain
or gzip: a local path, http(s), or an fsspec URL. Blank lines and lines that begin with `#` do not
count. What a listed path means does not depend on what happens to exist:

- with a scheme, or absolute: itself;
- relative, in a snapshot's list or beginning with `crawl-data/`: below `base_url`;
- any other relative path: below the folder of the list.

Mining reads straight from the URLs; `pipelines/crawl_download.py` brings the files into a folder.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import zlib
from collections import Counter
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from models import files
from models.errors import UserError
from models.fetch import DownloadFailed, RetryPolicy, read_url_bytes

BASE_URL = "https://data.commoncrawl.org"

_SNAPSHOT = re.compile(r"CC-MAIN-\d{4}-\d{2}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_LONGEST_LIST_BYTES = 64 << 20  # the largest snapshot's list has about 15 MB, unpacked
_SOURCES = (
    "a source is a snapshot such as 'CC-MAIN-2024-10', or the path or URL of a list of WET paths, "
    "one a line"
)


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CrawlFile(_Strict):
    """One WET file. path: as listed. url: where to read it, a fsspec URL or an absolute path.

    shard: the CCNet shard it belongs to. bytes, xxh3: as stored, where known.
    """

    path: str
    url: str = Field(min_length=1)
    shard: int = Field(ge=0)
    bytes: int | None = Field(default=None, ge=0)
    xxh3: str | None = Field(default=None, pattern=r"^[0-9a-f]{32}$")

    @field_validator("path")
    @classmethod
    def _confined(cls, path: str) -> str:
        if fault := _path_fault(path):
            raise ValueError(fault)
        return path

    @property
    def place(self) -> str:
        """The file's path below any folder that it is brought to, scheme and query left out."""
        return _place(self.path)


class CrawlManifest(_Strict):
    """The WET files of a crawl, in crawl order. `num_shards` counts the empty shards too."""

    schema_version: Literal[1] = 1
    name: str
    source: str
    num_shards: int = Field(ge=1)
    files: tuple[CrawlFile, ...]

    @model_validator(mode="after")
    def _shards_exist(self) -> Self:
        for file in self.files:
            if file.shard >= self.num_shards:
                raise ValueError(f"'{file.path}' is in shard {file.shard} of {self.num_shards}")
        return self

    def to_json(self) -> str:
        """The manifest as JSON, one line a file: the same bytes for the same crawl."""
        head = json.dumps(self.model_dump(exclude={"files"}), indent=1, ensure_ascii=False)
        lines = [json.dumps(file.model_dump(), ensure_ascii=False) for file in self.files]
        body = ",\n".join(f"  {line}" for line in lines)
        return head.removesuffix("\n}") + f',\n "files": [\n{body}\n ]\n}}\n'

    def write(self, url: str | os.PathLike[str]) -> None:
        """Write the manifest to a path or fsspec URL, all of it or nothing. Raises OSError."""
        files.write_atomic(url, self.to_json())

    @classmethod
    def read(cls, url: str | os.PathLike[str]) -> CrawlManifest:
        """The manifest at a path or fsspec URL. Raises UserError when it is none."""
        try:
            return cls.model_validate_json(files.read_bytes(url))
        except (OSError, ImportError) as error:
            raise UserError(
                f"the crawl manifest '{os.fspath(url)}' cannot be read: {_reason(error)}; make one "
                "with: gristmill crawl"
            ) from None
        except ValidationError as error:
            fault = error.errors()[0]
            place = ".".join(str(part) for part in fault["loc"]) or "file"
            raise UserError(
                f"'{os.fspath(url)}' is not a crawl manifest: {place}: {fault['msg']}; make one "
                "with: gristmill crawl"
            ) from None


def resolve(
    source: str,
    *,
    base_url: str = BASE_URL,
    num_shards: int | None = None,
    segments_per_shard: int = -1,
    sample: int | None = None,
    seed: int = 0,
    policy: RetryPolicy | None = None,
) -> CrawlManifest:
    """The crawl manifest of `source` (see the head of this module).

    First `sample` takes that many files, spread over the crawl (all, when it has no more); then
    `num_shards` groups the files as CCNet does and cuts each shard to its first
    `segments_per_shard` files, if that is positive. By default each file is a shard.
    Raises UserError, DownloadFailed.
    """
    _check_options(num_shards, segments_per_shard, sample)
    base = base_url.rstrip("/")
    is_snapshot = _SNAPSHOT.fullmatch(source) is not None
    list_url = f"{base}/crawl-data/{source}/wet.paths.gz" if is_snapshot else source
    paths = _listed_paths(_unpacked(_read_list(source, list_url, policy), list_url), list_url)
    folder = base if is_snapshot else _folder_of(list_url)
    urls = [_url(path, base if path.startswith("crawl-data/") else folder) for path in paths]
    _refuse_duplicates(urls, list_url)
    listed = list(zip(paths, urls, strict=True))
    if sample is not None:
        listed = [listed[index] for index in sample_indices(len(listed), sample, seed)]
    sizes = _local_sizes([url for _, url in listed])
    shards = num_shards or len(listed)
    return CrawlManifest(
        name=_name(source),
        source=source,
        num_shards=shards,
        files=tuple(
            CrawlFile(path=path, url=url, shard=shard, bytes=sizes.get(url))
            for shard, (first, last) in enumerate(
                shard_ranges(len(listed), shards, segments_per_shard)
            )
            for path, url in listed[first:last]
        ),
    )


def shard_ranges(n: int, num_shards: int, per_shard: int = -1) -> list[tuple[int, int]]:
    """First and last (exclusive) file of each of CCNet's shards of `n` files.

    Shard s of S takes [s*n//S, (s+1)*n//S), cut to its first `per_shard` files if positive.

    >>> shard_ranges(10, 4)
    [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    ranges = []
    for shard in range(num_shards):
        first, last = shard * n // num_shards, (shard + 1) * n // num_shards
        ranges.append((first, min(last, first + per_shard) if per_shard > 0 else last))
    return ranges


def sample_indices(n: int, count: int, seed: int = 0) -> list[int]:
    """`count` of the numbers 0..n-1 in order: one drawn from each of `count` equal stretches.

    All of them when `count >= n`. The draw is a hash, so it is the same on every machine and
    Python version.
    """
    if count >= n:
        return list(range(n))
    chosen = []
    for stretch, (first, last) in enumerate(shard_ranges(n, count)):
        digest = hashlib.sha256(f"{seed}:{stretch}".encode()).digest()
        chosen.append(first + int.from_bytes(digest[:8], "big") % (last - first))
    return chosen


def _check_options(num_shards: int | None, segments_per_shard: int, sample: int | None) -> None:
    for name, value in (("num_shards", num_shards), ("sample", sample)):
        if value is not None and value < 1:
            raise UserError(f"{name} is '{value}': give 1 or more, or leave it out")
    if segments_per_shard > 0 and num_shards is None:
        raise UserError(
            f"segments_per_shard is '{segments_per_shard}' but num_shards is not given, so each "
            "file is a shard: give num_shards too, or use sample to take fewer files"
        )


def _read_list(source: str, url: str, policy: RetryPolicy | None) -> bytes:
    try:
        if url.startswith(("http://", "https://")):
            return read_url_bytes(url, _LONGEST_LIST_BYTES, policy)
        size_bytes = files.size_bytes(url)
        if size_bytes > _LONGEST_LIST_BYTES:
            raise UserError(f"'{url}' has {size_bytes} bytes, too many for a list; {_SOURCES}")
        return files.read_bytes(url)
    except DownloadFailed as error:
        if not error.permanent:
            raise
        reason = error.reason
    except (OSError, ImportError, ValueError) as error:
        reason = _reason(error)
    what = f"'{url}'" if url == source else f"'{source}' at '{url}'"
    raise UserError(f"no list of WET paths for {what}: {reason}; {_SOURCES}")


def _unpacked(data: bytes, url: str) -> bytes:
    if not data.startswith(b"\x1f\x8b"):
        return data
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            text = file.read(_LONGEST_LIST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"the list '{url}' is damaged: {error}; fetch it again") from None
    if len(text) > _LONGEST_LIST_BYTES:
        raise UserError(f"'{url}' unpacks to more than {_LONGEST_LIST_BYTES} bytes; {_SOURCES}")
    return text


def _listed_paths(data: bytes, url: str) -> list[str]:
    if data.startswith(b"WARC/"):
        raise UserError(
            f"'{url}' is itself a WET file; mine it by its path, or write the path into a list"
        )
    try:
        lines = data.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"'{url}' is not UTF-8 text ({error.reason}); {_SOURCES}") from None
    paths = []
    for number, line in enumerate(lines, 1):
        path = line.strip()
        if not path or path.startswith("#"):
            continue
        if fault := _path_fault(path):
            raise UserError(f"line {number} of '{url}': {fault}; correct or remove that line")
        paths.append(path)
    if not paths:
        raise UserError(f"the list '{url}' names no file; {_SOURCES}")
    return paths


def _path_fault(path: str) -> str | None:
    if not _place(path):
        return f"the path '{path}' names no file"
    if _CONTROL.search(path):
        return f"the path {path!a} holds control characters"
    if ".." in path and ".." in re.split(r"[/\\]", path):
        return f"the path '{path}' leads upwards ('..')"
    return None


def _place(path: str) -> str:
    rest = path
    if "://" in path:
        parts = urlsplit(path)
        rest = f"{parts.netloc}/{parts.path}"
    return "/".join(part for part in rest.split("/") if part not in ("", "."))


def _folder_of(url: str) -> str:
    if files.is_local(url):
        return str(files.local_path(url).absolute().parent)
    return url.partition("?")[0].rpartition("/")[0]


def _url(path: str, folder: str) -> str:
    if "://" in path:
        return path
    return path if path.startswith("/") else files.join(folder, path)


def _refuse_duplicates(urls: list[str], list_url: str) -> None:
    # Read twice, every page of a file would be its own duplicate, and dedup might drop both.
    twice = [url for url, times in Counter(urls).items() if times > 1]
    if twice:
        raise UserError(
            f"the list '{list_url}' names {len(twice)} files more than once, the first is "
            f"'{twice[0]}'; keep one line of each: awk '!seen[$0]++' LIST > CLEAN"
        )


def _local_sizes(urls: list[str]) -> dict[str, int]:
    sizes, missing = {}, []
    for url in urls:
        if files.is_local(url):
            path = files.local_path(url)
            if path.is_file():
                sizes[url] = path.stat().st_size
            else:
                missing.append(url)
    if missing:
        raise UserError(
            f"{len(missing)} of {len(urls)} listed files do not exist, the first is "
            f"'{missing[0]}'; relative paths are looked for below the folder of the list, those "
            "that begin with 'crawl-data/' below the base URL"
        )
    return sizes


def _name(source: str) -> str:
    if match := _SNAPSHOT.search(source):
        return match.group()
    name = Path(_place(source)).name
    for suffix in (".gz", ".txt", ".paths"):
        name = name.removesuffix(suffix)
    return name or "crawl"


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
