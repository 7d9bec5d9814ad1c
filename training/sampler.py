"""The stream of examples: the same for any number of ranks and readers, resumed anywhere.

What it promises: example i of the global stream is a function of the corpus, the weights, the
recipe's data section and i. Rank r of n hands out the examples with i % n == r. How lanes make
that possible: `training.lanes`; the order of the pages: `training.order`.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from models import files
from models.errors import Fault, UserError
from training.domain_rows import DomainRows, Split
from training.domains import Corpus
from training.examples import Example, ExampleBuilder
from training.lanes import Cursors, Lanes, domain_key, own_indexes
from training.order import mix
from training.readers import Readers
from training.recipe import Data
from training.row_groups import Cache, RowGroups

_STATE_VERSION = 1
_PASS_WINDOW = 8  # of passes over all pages: a recipe's window must not change what is evaluated
_PASS_BATCH = 64


class ExampleStream:
    """Weighted, shuffled examples without end, or up to `count` of the global stream.

    weights: shares by domain (`domains.mixture`); a domain with 0 is never read. state: what
    `state_dict` gave, or `merge_states` of all ranks' when the number of ranks is another one.
    With `data.readers`, that many processes of this rank's own make the examples; close the
    stream, or use it as a context, to end them. Raises UserError.
    """

    def __init__(
        self,
        corpus: Corpus,
        weights: np.ndarray,
        builder: ExampleBuilder,
        *,
        data: Data,
        rank: int = 0,
        ranks: int = 1,
        state: dict[str, Any] | None = None,
        count: int | None = None,
    ) -> None:
        self._order = _order_digest(corpus, data)
        self._count = count
        first_lane, stride = own_indexes(0, rank=rank, ranks=ranks, lanes=data.lanes)
        self._own_lanes = range(first_lane, data.lanes, stride)
        self._lanes = data.lanes
        self._position = 0
        self._cursors: Cursors = {lane: {} for lane in self._own_lanes}
        if state is not None:
            self._restore(state)
        self._counts: Counter[str] = Counter()
        shares = [float(weight) for weight in weights]
        settings: dict[str, Any] = {"data": data, "first": self._position,
                                    "cursors": self._cursors}  # fmt: skip
        self._source: Lanes | Readers
        if data.readers:
            self._source = Readers(corpus, shares, builder, rank=rank, ranks=ranks, until=count,
                                   **settings)  # fmt: skip
        else:
            self._source = Lanes(corpus, shares, builder, rank=rank, ranks=ranks,
                                 cache_bytes=data.cache_bytes, **settings)  # fmt: skip

    def take(self, n: int) -> list[Example]:
        """This rank's part of the next `n` global examples, in order.

        Shorter only where a counted stream ends. Raises UserError when there is no example, in
        all domains or in one with a weight that was chosen; Fault when a store or reader fails.
        """
        until = self._position + n if self._count is None else min(self._position + n, self._count)
        steps = list(self._source.steps(until))
        for step in steps:
            cursors = self._cursors[step.number % self._lanes]
            cursors[step.domain] = step.position, step.start
            for reason, count in step.counts.items():
                self._counts[reason] += count
        self._position = max(self._position, until)
        return [step.example for step in steps if step.example is not None]

    @property
    def position(self) -> int:
        """Examples of the global stream that are taken."""
        return self._position

    @property
    def counts(self) -> dict[str, int]:
        """What became of pages since this object began, on this rank's lanes.

        "pages": used up; "held_out", "damaged_row_group", "damaged_shard": rows passed over; and
        the builder's reasons for text that no example holds. Sums over ranks count a lane once
        when the number of ranks (times readers) divides the lanes.
        """
        return dict(sorted(self._counts.items()))

    @property
    def damage(self) -> dict[str, str]:
        """Shards and row groups that could not be decoded so far: place -> why."""
        return dict(self._source.damage)

    @property
    def empty(self) -> dict[str, str]:
        """Domains that were drawn and had no example, so that others took their share: name ->
        why. Only under weights that nobody chose: 'proportional' and 'uniform'.
        """
        return dict(self._source.empty)

    def state_dict(self) -> dict[str, Any]:
        """Where this rank's lanes stand at `position`; plain JSON."""
        return {
            "version": _STATE_VERSION,
            "order": self._order,
            "position": self._position,
            "lanes": list(self._own_lanes),
            "cursors": {
                str(lane): {str(domain): list(place) for domain, place in sorted(places.items())}
                for lane, places in self._cursors.items()
                if places
            },
        }

    def close(self) -> None:
        """End the reader processes."""
        if isinstance(self._source, Readers):
            self._source.close()

    def __enter__(self) -> ExampleStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _restore(self, state: dict[str, Any]) -> None:
        if state.get("version") != _STATE_VERSION or state.get("order") != self._order:
            raise UserError(
                "the saved position is of another stream: the crawls, data.by, the filters, seed, "
                "lanes, held_out or window_row_groups differ; restore them, or start anew"
            )
        lacking = sorted(set(self._own_lanes) - set(state["lanes"]))
        if lacking:
            raise Fault(
                f"the saved position lacks lane {lacking[0]}: merge the states of all ranks"
            )
        self._position = state["position"]
        for lane in self._own_lanes:
            places = state["cursors"].get(str(lane), {})
            self._cursors[lane] = {
                int(domain): (position, start) for domain, (position, start) in places.items()
            }


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The states of all ranks as one, which any number of ranks starts from.

    Raises Fault when they do not belong together.
    """
    first = states[0]
    if any(
        state[key] != first[key] for state in states for key in ("version", "order", "position")
    ):
        raise Fault("the states of the ranks are not of one stream at one position")
    return {
        **first,
        "lanes": sorted({lane for state in states for lane in state["lanes"]}),
        "cursors": {lane: places for state in states for lane, places in state["cursors"].items()},
    }


def held_out_examples(
    corpus: Corpus, domain: int, builder: ExampleBuilder, *, data: Data, limit: int
) -> Iterator[Example]:
    """At most `limit` examples of one pass over a domain's held-out pages.

    Their order and random choices are fixed: no seed, weight or number of ranks changes them.
    `index` counts from 0. What is left at the end of the pass may be one shorter example, so a
    domain with little text has one, too.
    """
    texts = pages(corpus, domain, data=data, split="held_out")
    key = domain_key(corpus, domain)
    queue: deque[Any] = deque()
    start, opened, index = 0, 1, 0
    while index < limit:
        while len(queue) < opened:
            batch = [text for text, _ in zip(texts, range(_PASS_BATCH), strict=False)]
            if not batch:
                break
            queue.extend(builder.encode(batch))
        last = len(queue) < opened
        if last and not queue:
            return
        pages_open = [queue[number] for number in range(min(opened, len(queue)))]
        cut = builder.cut(pages_open, start, mix(key, index), last=last)
        start = cut.start
        for _ in range(cut.finished):
            queue.popleft()
        if cut.plan is not None:
            (arrays,) = builder.build([cut.plan])
            yield Example(index, domain, arrays)
            index, opened = index + 1, 1
        else:
            opened = max(1, opened - cut.finished) if cut.finished else opened + 1


def pages(corpus: Corpus, domain: int, *, data: Data, split: Split = "train") -> Iterator[str]:
    """Texts of one pass over a domain, shuffled as a stream is; the order is always the same.

    Damaged row groups are left out. Raises Fault when a store fails.
    """
    rows = DomainRows(
        corpus.domains[domain],
        key=domain_key(corpus, domain),
        window_row_groups=_PASS_WINDOW,
        share=data.held_out,
        split=split,
        row_groups=RowGroups(),
        cache=Cache(data.cache_bytes),
    )
    return rows.walk()


def _order_digest(corpus: Corpus, data: Data) -> str:
    """XXH3 of all that the order of pages depends on; where the files lie does not belong to it."""
    parts = [
        [data.seed, data.lanes, data.window_row_groups, data.held_out],
        [source.digest for source in corpus.sources],
        [
            [domain.name, domain.hosts and domain.hosts.groups,
             [[shard.source, shard.language, shard.bucket, shard.rows, shard.text_bytes,
               shard.bytes] for shard in domain.shards]]
            for domain in corpus.domains
        ],
    ]  # fmt: skip
    return files.xxh3_bytes(json.dumps(parts).encode())
