from typing import Any

from numpy.typing import NDArray

class WordSums:
    def __new__(
        cls,
        dim: int,
        minn: int,
        maxn: int,
        bucket: int,
        first_ngram: int,
        table: NDArray[Any],
        scale: float,
        buckets: NDArray[Any] | None,
        entries: list[tuple[bytes, int]],
        slots: int,
    ) -> WordSums: ...
    @property
    def kept(self) -> int: ...
    def add(self, lines: list[bytes], out: NDArray[Any]) -> None: ...
