"""The lanes of the global stream that one process works on: which page, which example comes next.

Example i comes from lane `i % lanes`. Its domain is drawn by a hash of (seed, i), and it is cut
from the lane's own open pages of that domain. Row P of a domain's endless sequence belongs to
lane `P % lanes`. So a lane needs nothing of any other, and its state is, for each domain, the
position of its first page that is not used up and how far that one is used.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from models.errors import UserError
from training.domain_rows import DomainRows, EmptyDomain
from training.domains import Corpus, Domain
from training.examples import Example, ExampleBuilder
from training.order import mix
from training.recipe import Data
from training.row_groups import Cache, RowGroups

_DRAW, _EXAMPLE, _ORDER = range(3)
_ENCODED_PAGES = 256
_ENCODED_BYTES = 1 << 20
"""Most pages, and about how many bytes of text, that are tokenised at once."""
_AHEAD_BYTES = 4 << 20
"""Text that is tokenised ahead, all domains together: half of what there may be. A page that is
being cut comes on top, for each lane and domain."""
_HELD_CHARS = 64 << 20
"""Text that waits tokenised in all, about; then the lanes and domains that were not drawn for the
longest time lose theirs, and tokenise it again when they are drawn."""
_BUILT_AT_ONCE = 32
_BARREN_PAGES = 10_000

Cursors = dict[int, dict[int, tuple[int, int]]]
"""lane -> domain -> (position of the first page not used up, how far that one is used)."""


class Step(NamedTuple):
    """One example of the global stream, and where its lane stands after it.

    number: its index. counts: what became of rows and pages. example: None when another process
    hands it out.
    """

    number: int
    domain: int
    position: int
    start: int
    counts: Mapping[str, int]
    example: Example | None


class _Page(NamedTuple):
    """A tokenised page. passed: rows before it that gave no page, by reason."""

    position: int
    value: Any
    chars: int
    passed: Mapping[str, int]


class _Cursor:
    """One lane in one domain. queue: its pages from `position` on; `ahead`: the row after them."""

    __slots__ = ("ahead", "position", "queue", "start")

    def __init__(self, position: int, start: int) -> None:
        self.position = self.ahead = position
        self.start = start
        self.queue: deque[_Page] = deque()


def domain_key(corpus: Corpus, domain: int, *seed: int) -> int:
    """Key of a domain's order; it depends on the domain's name, and not on other domains."""
    return mix(*seed, _ORDER, xxhash.xxh3_64_intdigest(corpus.names[domain].encode()))


def own_indexes(first: int, *, rank: int, ranks: int, lanes: int) -> tuple[int, int]:
    """Which examples, from `first` on, come from lanes that a rank works on: (index, stride).

    stride: the greatest common divisor of `lanes` and `ranks`. It is `ranks` when that divides
    the lanes; otherwise several ranks work on a lane, and each hands out its part.
    """
    stride = math.gcd(lanes, ranks)
    return first + (rank - first) % stride, stride


class Lanes:
    """Steps of the examples of the global stream from `first` on that `own_indexes` gives."""

    def __init__(
        self,
        corpus: Corpus,
        weights: Sequence[float],
        builder: ExampleBuilder,
        *,
        data: Data,
        rank: int,
        ranks: int,
        first: int,
        cursors: Cursors,
        cache_bytes: int,
    ) -> None:
        self._builder = builder
        self._held_chars = 0
        self._recent: OrderedDict[_Cursor, None] = OrderedDict()
        self._seed, self._lanes = data.seed, data.lanes
        self._rank, self._ranks = rank, ranks
        self.next_index, self.stride = own_indexes(first, rank=rank, ranks=ranks, lanes=data.lanes)
        self._own_lanes = range(rank % self.stride, data.lanes, self.stride)
        self._bounds = _bounds(weights)
        self._weighty = {number for number, weight in enumerate(weights) if weight}
        self._chosen = data.weights not in ("proportional", "uniform")
        self._names = corpus.names
        self._empty: dict[int, str] = {}
        self._row_groups = RowGroups()
        cache = Cache(cache_bytes)
        self._rows = [
            DomainRows(
                domain,
                key=domain_key(corpus, number, data.seed),
                window_row_groups=data.window_row_groups,
                share=data.held_out,
                split="train",
                row_groups=self._row_groups,
                cache=cache,
                stride=self.stride,
                residue=rank % self.stride,
            )
            for number, domain in enumerate(corpus.domains)
        ]
        # Doubles with every call: the first example waits for one page to be tokenised.
        self._pages_at_once = [1] * len(corpus.domains)
        self._most_pages = [
            _most_pages(domain, weight / sum(weights))
            for domain, weight in zip(corpus.domains, weights, strict=True)
        ]
        self._cursors: list[dict[int, _Cursor]] = [{} for _ in corpus.domains]
        for lane in self._own_lanes:
            for number, (position, start) in cursors.get(lane, {}).items():
                self._cursors[number][lane] = _Cursor(position, start)

    @property
    def damage(self) -> dict[str, str]:
        """What could not be decoded so far: place -> why."""
        return self._row_groups.damage

    @property
    def empty(self) -> dict[str, str]:
        """Domains that were drawn and have no example: name -> why."""
        return {self._names[domain]: why for domain, why in self._empty.items()}

    def steps(self, until: int) -> Iterator[Step]:
        """The steps of this process's lanes up to index `until`, that not included."""
        while self.next_index < until:
            steps: list[Step] = []
            plans = []
            while self.next_index < until and len(steps) < _BUILT_AT_ONCE:
                step, plan = self._step(self.next_index)
                steps.append(step)
                if self.next_index % self._ranks == self._rank:
                    plans.append(plan)
                self.next_index += self.stride
            built = iter(self._builder.build(plans))
            for step in steps:
                if step.number % self._ranks == self._rank:
                    yield step._replace(example=Example(step.number, step.domain, next(built)))
                else:
                    yield step

    def _step(self, index: int) -> tuple[Step, Any]:
        """Draw a domain until one has an example.

        In a corpus of many languages some have one page, which is held out or gives nothing.
        Each process finds out by itself, when it draws such a domain, and all find the same.
        """
        lane = index % self._lanes
        for attempt in itertools.count():
            draw = (self._seed, _DRAW, index, attempt) if attempt else (self._seed, _DRAW, index)
            domain = bisect_right(self._bounds, mix(*draw))
            if domain in self._empty:
                continue
            try:
                return self._cut(index, domain, self._cursor(domain, lane))
            except EmptyDomain as error:
                self._empty[domain] = error.why
                for cursor in self._cursors[domain].values():
                    self._recent.pop(cursor, None)
                    self._held_chars -= sum(page.chars for page in cursor.queue)
                self._cursors[domain].clear()
                # Weights that someone chose are kept, or the run does not go on.
                if self._chosen or self._weighty <= self._empty.keys():
                    raise
        raise AssertionError  # the attempts have no end

    def _cut(self, index: int, domain: int, cursor: _Cursor) -> tuple[Step, Any]:
        """The step, without its example, and what the builder makes that of."""
        lane, key = index % self._lanes, mix(self._seed, _EXAMPLE, index)
        self._recent[cursor] = None
        self._recent.move_to_end(cursor)
        counts: dict[str, int] = {}
        barren = 0
        # Each example starts from one open page, whatever the last one had open: a resumed
        # stream knows only where the first page stands.
        opened = 1
        while True:
            while len(cursor.queue) < opened:
                self._fill(domain, lane)
            pages = [cursor.queue[number].value for number in range(opened)]
            cut = self._builder.cut(pages, cursor.start, key)
            for reason in cut.skipped:
                counts[reason] = counts.get(reason, 0) + 1
            cursor.start = cut.start
            for _ in range(cut.finished):
                page = cursor.queue.popleft()
                cursor.position = page.position + self._lanes
                self._held_chars -= page.chars
                for reason, count in page.passed.items():
                    counts[reason] = counts.get(reason, 0) + count
            if cut.finished:
                counts["pages"] = counts.get("pages", 0) + cut.finished
            if cut.plan is not None:
                break
            opened = max(1, opened - cut.finished) if cut.finished else opened + 1
            barren += 1
            self._check_barren(domain, barren)
        return Step(index, domain, cursor.position, cursor.start, counts, None), cut.plan

    def _cursor(self, domain: int, lane: int) -> _Cursor:
        cursor = self._cursors[domain].get(lane)
        if cursor is None:
            cursor = self._cursors[domain][lane] = _Cursor(lane, 0)
        return cursor

    def _check_barren(self, domain: int, pages: int) -> None:
        """Raise when so many pages without an example mean that none will come."""
        found = self._rows[domain].domain
        if pages <= min(64 + 64 * found.rows, _BARREN_PAGES):
            return
        if pages <= _BARREN_PAGES:  # each page was there many times
            raise EmptyDomain(
                found.name, f"gives no example: none came of its {found.rows:,} pages"
            )
        raise UserError(
            f"domain '{found.name}' gives no example: none came of {pages - 1:,} pages in a row; "
            "leave it out, give it the weight 0, or shorten examples.sequence_length"
        )

    def _fill(self, domain: int, lane: int) -> None:
        """Tokenise pages of a domain: one at least for `lane`, and some ahead for all lanes."""
        allotted = self._share_out(domain, lane)
        cursors = {one: self._cursor(domain, one) for one in allotted}
        wanted = {one: (cursors[one].ahead, count) for one, count in allotted.items()}
        rows = self._rows[domain].fetch(wanted, self._lanes)
        found = [(cursors[one], row) for one, listed in rows.items() for row in listed]
        values = self._builder.encode([row.text for _, row in found])
        for (cursor, row), value in zip(found, values, strict=True):
            cursor.queue.append(_Page(row.position, value, len(row.text), row.passed))
            cursor.ahead = row.position + self._lanes
            self._held_chars += len(row.text)
            self._recent.setdefault(cursor)
        if self._held_chars > _HELD_CHARS:
            self._let_go(cursors[lane])
            self._pages_at_once[domain] = 1

    def _let_go(self, current: _Cursor) -> None:
        """Forget tokenised pages, those longest not asked for first, until there is room."""
        while self._held_chars > _HELD_CHARS and len(self._recent) > 1:
            cursor, _ = self._recent.popitem(last=False)
            if cursor is current:
                self._recent[cursor] = None
                continue
            self._held_chars -= sum(page.chars for page in cursor.queue)
            cursor.queue.clear()
            cursor.ahead = cursor.position

    def _share_out(self, domain: int, lane: int) -> dict[int, int]:
        """How many pages to tokenise for which lane: the emptiest come first, after `lane`."""
        count = self._pages_at_once[domain] if 2 * self._held_chars < _HELD_CHARS else 1
        self._pages_at_once[domain] = min(2 * count, self._most_pages[domain])
        allotted = {lane: 1}
        enough = 2 * -(-count // len(self._own_lanes))
        held = self._cursors[domain]
        waiting = [
            (len(held[one].queue) if one in held else 0, (one - lane) % self._lanes, one)
            for one in self._own_lanes
        ]
        heapq.heapify(waiting)
        while count > 1 and waiting[0][0] < enough:
            pages, distance, one = waiting[0]
            heapq.heapreplace(waiting, (pages + 1, distance, one))
            allotted[one] = allotted.get(one, 0) + 1
            count -= 1
        return allotted


def _most_pages(domain: Domain, weight: float) -> int:
    """Most pages of a domain to tokenise at once."""
    page_bytes = max(1.0, sum(shard.text_bytes for shard in domain.shards) / domain.rows)
    size = min(_ENCODED_BYTES, _AHEAD_BYTES * weight)
    return max(1, min(_ENCODED_PAGES, int(size / page_bytes)))


def _bounds(weights: Sequence[float]) -> list[int]:
    """Upper ends of the domains' parts of the 64-bit numbers; that of a weight of 0 is empty."""
    ends = np.cumsum(np.asarray(weights, float))
    last = int(np.flatnonzero(weights)[-1])
    bounds = [int(end / ends[-1] * 2.0**64) for end in ends]
    return [*bounds[:last], *[1 << 64] * (len(bounds) - last)]
