"""Reads fastText's binary model files (.bin and .ftz), format versions 11 and 12.

Layout, little-endian and without padding: magic, version; the arguments; the dictionary (words,
then labels, each with its count and type); for a pruned model the n-gram buckets that are left;
the input matrix; the output matrix. A matrix is dense (float32) or product-quantised (Jégou,
Douze and Schmid 2011, "Product quantization for nearest neighbor search"), then perhaps with
the row's norm quantised apart (Joulin et al. 2016, "FastText.zip", section 3.1).

Every length in the file is held against the bytes that are there before it is used, so a
damaged file is refused here, where fastText would read on without end or ask for any amount of
memory. The file is memory-mapped: of the matrices only the rows that are asked for are read.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]

HIERARCHICAL_SOFTMAX: Final = 1
SOFTMAX: Final = 3
SUPERVISED: Final = 3

_MAGIC: Final = 793_712_314
_VERSIONS: Final = (11, 12)
_ENTRY: Final = struct.Struct("<qb")
_CENTROIDS: Final = 256
_LARGEST_MAXN: Final = 255
_SCANNED_ROWS_BYTES: Final = 1 << 24


class UnknownFormat(Exception):
    """The file is of another format, or of a version that this reader does not know."""


class DamagedModel(Exception):
    """The file contradicts itself, or ends too early."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """What the model was trained with, as far as reading a text needs it."""

    dim: int
    word_ngrams: int
    loss: int
    """1 hierarchical softmax, 2 negative sampling, 3 softmax, 4 one against all."""
    model: int
    """1 and 2 word vectors (cbow, skip-gram), 3 supervised."""
    bucket: int
    """Size of the table that character n-grams are hashed into."""
    minn: int
    maxn: int
    """Shortest and longest character n-gram; `maxn` 0: none."""


class DenseMatrix:
    """A matrix as it stands in the file: float32, row by row."""

    def __init__(self, mapped: NDArray[np.uint8], shape: tuple[int, int]) -> None:
        self.shape = shape
        # Bytes, since the matrix stands at any offset, and NumPy would copy unaligned floats.
        self.bytes = mapped.reshape(shape[0], 4 * shape[1])
        """(rows, 4 * columns)"""

    def rows(self, ids: NDArray[np.integer]) -> Rows:
        """Rows `ids` (n,), as (n, columns)."""
        return np.take(self.bytes, ids, axis=0).view(np.float32)

    def largest(self) -> float:
        """The largest magnitude in the matrix; inf or nan where a value is none."""
        step = max(1, _SCANNED_ROWS_BYTES // (4 * self.shape[1]))
        largest = 0.0
        for first in range(0, self.shape[0], step):
            block = self.bytes[first : first + step].copy().view(np.float32)
            # np.maximum hands a nan on, where max() may lose it.
            largest = float(np.maximum(largest, np.maximum(block.max(), -block.min())))
        return largest


class QuantisedMatrix:
    """A product-quantised matrix: each row is a code for each of its sub-vectors."""

    def __init__(
        self,
        shape: tuple[int, int],
        codes: NDArray[np.uint8],
        centroids: list[Rows],
        norm_codes: NDArray[np.uint8] | None,
        norms: Rows | None,
    ) -> None:
        self.shape = shape
        self._codes = codes.reshape(shape[0], len(centroids))
        self._centroids = centroids
        self._norm_codes = norm_codes
        self._norms = norms

    def rows(self, ids: NDArray[np.integer]) -> Rows:
        """Rows `ids` (n,), as (n, columns)."""
        codes = np.take(self._codes, ids, axis=0)
        parts = [table[codes[:, part]] for part, table in enumerate(self._centroids)]
        found = np.concatenate(parts, axis=1)
        if self._norms is not None and self._norm_codes is not None:
            found *= self._norms[np.take(self._norm_codes, ids)][:, None]
        return found

    def largest(self) -> float:
        """No magnitude in the matrix is larger; inf or nan where a value is none."""
        largest = np.max([np.abs(table).max() for table in self._centroids])
        return float(largest if self._norms is None else largest * np.abs(self._norms).max())


@dataclass(frozen=True, slots=True)
class FastTextModel:
    """A model file, read. `words` and `labels` are as they stand in the file, in its order."""

    arguments: Arguments
    words: list[bytes]
    labels: list[bytes]
    label_counts: list[int]
    pruned: tuple[NDArray[np.int32], NDArray[np.int32]] | None
    """Of a pruned model: the buckets that are left, and the row of each, counted from the first
    row after the words'. None: all buckets have rows."""
    input: DenseMatrix | QuantisedMatrix
    output: DenseMatrix | QuantisedMatrix


def read_fasttext_model(path: str | os.PathLike[str]) -> FastTextModel:
    """The model in the local file `path`, which stays memory-mapped as long as it is used.

    Raises UnknownFormat, DamagedModel, or OSError when it cannot be read.
    """
    if Path(path).stat().st_size == 0:
        raise UnknownFormat("the file is empty")
    with Path(path).open("rb") as opened:
        file = _Reader(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    try:
        magic, version = file.unpack("ii")
    except DamagedModel:
        raise UnknownFormat("the file is too short") from None
    if magic != _MAGIC or version not in _VERSIONS:
        raise UnknownFormat(f"magic number {magic}, version {version}")
    arguments = _read_arguments(file, version)
    size, words, labels, _, prunings = file.unpack("iiiqq")
    if min(words, labels) < 0 or size != words + labels or prunings < -1:
        raise DamagedModel(f"a dictionary of {size} entries, {words} words and {labels} labels")
    entries, label_counts = _read_entries(file, words, labels)
    pruned = None
    if prunings >= 0:
        pairs = file.array(np.int32, 2 * prunings).reshape(-1, 2)
        pruned = (pairs[:, 0], pairs[:, 1])
    quantised = bool(file.unpack("?")[0])
    if pruned is not None and not quantised:
        raise DamagedModel("a pruned dictionary, and a matrix that is not quantised")
    first = _read_matrix(file, quantised)
    second = _read_matrix(file, bool(file.unpack("?")[0]) and quantised)
    model = FastTextModel(
        arguments, entries[:words], entries[words:], label_counts, pruned, first, second
    )
    _check_shapes(model)
    return model


class _Reader:
    """Takes values off the front of the file."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped = mapped
        self._bytes = np.frombuffer(mapped, np.uint8)
        self.offset = 0

    def take(self, count: int) -> NDArray[np.uint8]:
        if not 0 <= count <= self._bytes.size - self.offset:
            raise DamagedModel(
                f"{count:,} bytes are due at offset {self.offset:,}, and the file has "
                f"{self._bytes.size:,}"
            )
        self.offset += count
        return self._bytes[self.offset - count : self.offset]

    def unpack(self, layout: str) -> tuple[int, ...]:
        layout = "<" + layout
        return struct.unpack(layout, self.take(struct.calcsize(layout)).tobytes())

    def array(self, dtype: type[np.int32] | type[np.float32], count: int) -> NDArray[Any]:
        # A copy: small, and what stands in the file need not be aligned.
        return np.frombuffer(self.take(count * np.dtype(dtype).itemsize).tobytes(), dtype)

    def entry(self) -> tuple[bytes, int, int]:
        """A word or label of the dictionary, how often it was seen, and 0 or 1 for which it is."""
        start = self.offset
        end = self._mapped.find(b"\0", start)
        if end < 0 or end + 10 > len(self._mapped):
            raise DamagedModel(f"the dictionary does not end (offset {start:,})")
        self.offset = end + 10
        return (self._mapped[start:end], *_ENTRY.unpack_from(self._mapped, end + 1))


def _read_arguments(file: _Reader, version: int) -> Arguments:
    values = file.unpack("12id")
    dim, word_ngrams, loss, model, bucket, minn, maxn = (
        int(values[i]) for i in (0, 5, 6, 7, 8, 9, 10)
    )
    if version == 11 and model == SUPERVISED:
        maxn = 0  # models of that version are older than n-grams in supervised models
    # fastText divides by the number of buckets.
    if dim < 1 or not 0 <= maxn <= _LARGEST_MAXN or bucket < (maxn > 0):
        raise DamagedModel(f"dim is {dim}, maxn {maxn}, bucket {bucket}")
    return Arguments(dim, word_ngrams, loss, model, bucket, minn, maxn)


def _read_entries(file: _Reader, words: int, labels: int) -> tuple[list[bytes], list[int]]:
    entries: list[bytes] = []
    counts: list[int] = []
    for index in range(words + labels):
        entry, count, kind = file.entry()
        if kind != (index >= words):
            raise DamagedModel(f"entry {index:,} of {words:,} words and {labels:,} labels is wrong")
        entries.append(entry)
        if kind:
            counts.append(count)
    return entries, counts


def _read_matrix(file: _Reader, quantised: bool) -> DenseMatrix | QuantisedMatrix:
    if not quantised:
        rows, columns = file.unpack("qq")
        if min(rows, columns) < 1:
            raise DamagedModel(f"a matrix of {rows} rows and {columns} columns")
        return DenseMatrix(file.take(4 * rows * columns), (rows, columns))
    has_norms, rows, columns, code_bytes = file.unpack("?qqi")
    codes = file.take(code_bytes)
    centroids = _read_quantiser(file)
    if rows < 1 or columns != sum(t.shape[1] for t in centroids):
        raise DamagedModel(f"a quantised matrix of {rows} rows and {columns} columns")
    if code_bytes != rows * len(centroids):
        raise DamagedModel(f"{code_bytes:,} codes for {rows:,} rows of {len(centroids)}")
    norm_codes = norms = None
    if has_norms:
        norm_codes = file.take(rows)
        tables = _read_quantiser(file)
        if len(tables) != 1 or tables[0].shape[1] != 1:
            raise DamagedModel("norms of more than one number")
        norms = tables[0][:, 0]
    return QuantisedMatrix((rows, columns), codes, centroids, norm_codes, norms)


def _read_quantiser(file: _Reader) -> list[Rows]:
    """For each part of a row, its centroids (256, width of the part)."""
    dim, parts, width, last_width = file.unpack("iiii")
    if min(dim, parts, width, last_width) < 1 or (parts - 1) * width + last_width != dim:
        raise DamagedModel(f"{dim} columns quantised as {parts} parts of {width} and {last_width}")
    values = file.array(np.float32, dim * _CENTROIDS)
    cuts = [part * _CENTROIDS * width for part in range(1, parts)]
    return [part.reshape(_CENTROIDS, -1) for part in np.split(values, cuts)]


def _check_shapes(model: FastTextModel) -> None:
    arguments = model.arguments
    rows, columns = model.input.shape
    if columns != arguments.dim or model.output.shape[1] != arguments.dim:
        raise DamagedModel(f"dim is {arguments.dim}, a matrix has other columns")
    outputs = len(model.labels if arguments.model == SUPERVISED else model.words)
    if model.output.shape[0] != outputs:
        raise DamagedModel(f"{model.output.shape[0]:,} output rows for {outputs:,} outcomes")
    # With word n-grams the table is in use even where there are no character n-grams.
    hashed = arguments.bucket if arguments.maxn > 0 or arguments.word_ngrams > 1 else 0
    if model.pruned is not None:
        buckets, targets = model.pruned
        hashed = int(targets.max(initial=-1)) + 1
        if min(targets.min(initial=0), buckets.min(initial=0)) < 0:
            raise DamagedModel("a pruned n-gram with a negative number")
    if len(model.words) + hashed > rows:
        raise DamagedModel(f"{len(model.words):,} words and {hashed:,} n-grams in {rows:,} rows")
