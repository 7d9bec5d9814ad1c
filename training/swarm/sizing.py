"""What an epoch of a swarm costs with given peers, before anybody joins, and what to change.

Pure functions: the parameters of a network and the peers' speeds in, seconds out. Computing is
samples over samples/s. A round is a matchmaking window, which nothing shortens, then an all-reduce,
of which `training.swarm.shares` says how long its busiest link has to work. `sync` waits for both
after it computed, `delayed` while it computes the next epoch, `diloco` after many local steps.
Memory of a peer is a line through two measurements (`MEASURED_MEMORY`).

Left out: latency, peers behind one line, what a processor spends on encoding (on loopback an 8-bit
codec is slower than float16), whole microbatches, and peers that go. A real run is slower: read
what it costs on its page.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast

from models.errors import UserError
from training.swarm.shares import Link, busy_s, share_out, traffic
from training.swarm.types import Role

CODEC_BYTES = {"none": 4, "float16": 2, "scaled-float16": 2, "uniform8": 1, "quantile8": 1}
"""Bytes of a number as it travels."""
MEASURED_MEMORY = ((1_000_000, 0.66e9), (20_000_000, 2.1e9))
"""Parameters and bytes (PSS of all processes of a peer, Adam), measured with hivemind 1.1.12;
without what the network computes with, which the batch and the sequence decide."""
WINDOWS_PER_EPOCH = 3
"""An epoch should compute for so many matchmaking windows; shorter ones got peers stuck."""
GOOD_SHARE = 0.2
"""Of the time at most this should go into averaging."""
MOST_PEERS = 1000
_FEW_TRAINERS = 3
_ROUNDED = 1 - 1e-9
_SPEC = re.compile(
    r"(?:(?P<count>\d+)x)?(?P<rate>[\d.]+)@(?P<up>[\d.]+)(?:/(?P<down>[\d.]+))?(?::(?P<role>client|auxiliary))?"
)

Mode = Literal["sync", "delayed", "diloco"]


@dataclass(frozen=True)
class Machine:
    """A peer: samples/s that it computes, its link in Mbit/s; a client is behind a firewall, an
    auxiliary computes nothing."""

    rate: float
    up_mbit: float
    down_mbit: float
    role: Role = "node"


@dataclass(frozen=True)
class Design:
    """What the recipe says. vectors: gradients that a peer sends, one for each term of the loss
    where they are not put together. local_steps, local_batch, patience_s: of `diloco`."""

    parameters: int
    codec: str
    mode: Mode
    target_batch: int
    microbatch: int
    matchmaking_s: float
    epochs: int
    vectors: int = 1
    local_steps: int = 1
    local_batch: int = 1
    patience_s: float = 60.0
    allreduce_limit_s: float = 300.0
    download_limit_s: float = 300.0

    @property
    def vector_bytes(self) -> int:
        return self.parameters * self.vectors * CODEC_BYTES[self.codec]


@dataclass(frozen=True)
class Sized:
    """An epoch in numbers. waiting_s: of it, in which no peer computes for the averaging's sake;
    share_averaging: that of the epoch; download_s: of weights and moments, at the slowest peer."""

    samples: int
    compute_s: float
    matchmaking_s: float
    allreduce_s: float
    waiting_s: float
    epoch_s: float
    share_averaging: float
    samples_per_s: float
    run_s: float
    sent_bytes: int
    state_bytes: int
    download_s: float
    memory_bytes: int
    advice: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"advice": list(self.advice)}


def machines(specs: Sequence[str]) -> list[Machine]:
    """Peers from texts as `2x30@100/50`: two peers of 30 samples/s, 100 Mbit/s up and 50 down.

    Without the slash both ways are alike; `:client` at the end: behind a firewall; `:auxiliary`,
    with 0 samples/s: it only reduces. Raises UserError.
    """
    found: list[Machine] = []
    for spec in specs:
        match = _SPEC.fullmatch(spec)
        numbers = None if match is None else _numbers(match)
        if match is None or numbers is None:
            raise UserError(
                f"--peers '{spec}' is no peer: give COUNTxRATE@UP/DOWN, as 2x30@100/50 for two "
                "peers of 30 samples/s with 100 Mbit/s up and 50 down, :client behind a firewall, "
                "0@500:auxiliary for one that only reduces"
            )
        count, rate, up, down = numbers
        if count + len(found) > MOST_PEERS:
            raise UserError(f"--peers '{spec}': more than {MOST_PEERS} peers are too many")
        role = cast("Role", match["role"] or "node")
        found += [Machine(rate, up, down, role)] * count
    if not _trainers(found):
        raise UserError("no peers that train: give --peers, as --peers 2x30@100/50")
    return found


def _numbers(match: re.Match[str]) -> tuple[int, float, float, float] | None:
    try:
        rate, up = float(match["rate"]), float(match["up"])
        down = float(match["down"] or match["up"])
    except ValueError:
        return None
    count = int(match["count"] or 1)
    computes = rate == 0 if match["role"] == "auxiliary" else 0 < rate < math.inf
    good = count > 0 and computes and all(0 < value < math.inf for value in (up, down))
    return (count, rate, up, down) if good else None


def _trainers(peers: Sequence[Machine]) -> list[Machine]:
    return [peer for peer in peers if peer.role != "auxiliary"]


def _reachable(peers: Sequence[Machine]) -> int:
    """Peers that can reduce."""
    return sum(peer.role != "client" for peer in peers)


def size(design: Design, peers: Sequence[Machine]) -> Sized:
    """What an epoch of `design` costs with `peers`, and what to change."""
    return replace(_figures(design, peers), advice=tuple(_advice(design, peers)))


def _figures(design: Design, peers: Sequence[Machine]) -> Sized:
    compute, samples = _compute_s(design, peers)
    alone = len(_trainers(peers)) == 1
    matchmaking = 0.0 if alone else design.matchmaking_s
    allreduce = 0.0 if alone else allreduce_s(design, peers)
    averaging = matchmaking + allreduce
    # The next batch is computed meanwhile, but no step is taken before the round has ended.
    waiting = max(0.0, averaging - compute) if design.mode == "delayed" else averaging
    epoch = compute + waiting
    return Sized(
        samples=samples,
        compute_s=compute,
        matchmaking_s=matchmaking,
        allreduce_s=allreduce,
        waiting_s=waiting,
        epoch_s=epoch,
        share_averaging=waiting / epoch,
        samples_per_s=samples / epoch,
        run_s=epoch * design.epochs,
        sent_bytes=0 if alone else _most_sent(design, peers),
        state_bytes=state_bytes(design),
        download_s=0.0 if alone else download_s(design, peers),
        memory_bytes=memory_bytes(design.parameters),
        advice=(),
    )


def _compute_s(design: Design, peers: Sequence[Machine]) -> tuple[float, int]:
    """Seconds until an epoch's samples are there, and their number.

    Under `diloco` the fast half waits `patience_s` for the others, who come with what they have.
    """
    if design.mode != "diloco":
        return design.target_batch / sum(peer.rate for peer in peers), design.target_batch
    each = design.local_steps * design.local_batch
    trainers = _trainers(peers)
    times = sorted(each / peer.rate for peer in trainers)
    half = times[(len(times) + 1) // 2 - 1]
    seconds = min(times[-1], half + design.patience_s)
    return seconds, sum(min(each, math.floor(seconds * peer.rate)) for peer in trainers)


def allreduce_s(design: Design, peers: Sequence[Machine]) -> float:
    """How long the busiest link of a round works, by the model of the shares."""
    if not _reachable(peers):
        return math.inf
    links = _links(peers)
    shares = share_out(links, design.parameters * design.vectors)
    return max(busy_s(links, shares, design.vector_bytes))


def state_bytes(design: Design) -> int:
    """What a joiner downloads: weights and two moments; under DiLoCo weights and one momentum."""
    return design.parameters * 4 * (2 if design.mode == "diloco" else 3)


def download_s(design: Design, peers: Sequence[Machine]) -> float:
    """The state at the slowest joiner, from the quickest other peer that can be reached."""
    slowest, trainers = 0.0, _trainers(peers)
    for number, joiner in enumerate(trainers):
        ups = [
            donor.up_mbit
            for other, donor in enumerate(trainers)
            if other != number and donor.role == "node"
        ]
        if ups:  # else it is the only one that can be reached, and has nobody to join
            rate = min(joiner.down_mbit, max(ups))
            slowest = max(slowest, state_bytes(design) * 8 / (rate * 1e6))
    return slowest


def memory_bytes(parameters: int) -> int:
    """Of all processes of a peer, on the line through the measurements."""
    (small, low), (large, high) = MEASURED_MEMORY
    each = (high - low) / (large - small)
    return round(low + each * (parameters - small))


def _links(peers: Sequence[Machine]) -> list[Link]:
    return [
        Link(f"{number:04d}", peer.role, peer.up_mbit, peer.down_mbit)
        for number, peer in enumerate(peers)
    ]


def _most_sent(design: Design, peers: Sequence[Machine]) -> int:
    if not _reachable(peers):
        return 0
    links = _links(peers)
    shares = share_out(links, design.parameters * design.vectors)
    return round(max(traffic(links, shares, design.vector_bytes)))


def table(found: Sized, peers: Sequence[Machine]) -> str:
    """`found` for a person."""
    behind = ""
    for role, name in (("client", "clients"), ("auxiliary", "auxiliaries")):
        count = sum(peer.role == role for peer in peers)
        behind += f", {count} of them {name}" if count else ""
    rows = [
        ("peers", f"{len(peers)}{behind}; {sum(peer.rate for peer in peers):,.4g} samples/s"),
        ("an epoch", f"{found.samples:,} samples"),
        ("computing", _time(found.compute_s)),
        ("matchmaking", _time(found.matchmaking_s)),
        ("all-reduce", f"{_time(found.allreduce_s)}; the busiest peer sends "
         f"{found.sent_bytes / 1e6:,.3g} MB"),
        ("altogether", f"{_time(found.epoch_s)}; {found.share_averaging:.0%} of it averaging; "
         f"{found.samples_per_s:,.4g} samples/s"),
        ("the run", _time(found.run_s)),
        ("a late joiner", f"downloads {found.state_bytes / 1e6:,.4g} MB, "
         + (f"{_time(found.download_s)} at the slowest" if found.download_s else "of nobody")),
        ("memory", f"{found.memory_bytes / 1e9:.1f} GB a peer, and what a microbatch needs"),
    ]  # fmt: skip
    lines = [f"{name:<14} {text}" for name, text in rows]
    return "\n".join([*lines, *(f"change: {line}" for line in found.advice)])


def _time(seconds: float) -> str:
    if math.isinf(seconds):
        return "for ever"
    for unit, name, above in ((86_400, "days", 2 * 86_400), (3600, "h", 7200), (60, "min", 600)):
        if seconds >= above:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds:.1f} s"


# What to change


def _advice(design: Design, peers: Sequence[Machine]) -> list[str]:
    if len(_trainers(peers)) == 1:
        return ["too few peers: one trains alone and averages nothing, `gristmill train` does that"]
    if not _reachable(peers):
        return ["all peers are clients: at least one has to be reachable (an open port, a public "
                "address; an auxiliary, that only reduces, will do), or nobody can "
                "reduce"]  # fmt: skip
    found = [line for rule in _RULES if (line := rule(design, peers)) is not None]
    return found


def _too_short(design: Design, peers: Sequence[Machine]) -> str | None:
    """The rule: an epoch computes for at least WINDOWS_PER_EPOCH matchmaking windows."""
    compute, _ = _compute_s(design, peers)
    least = WINDOWS_PER_EPOCH * design.matchmaking_s
    if compute >= least * _ROUNDED:
        return None
    said = (
        f"an epoch computes for {compute:.3g} s, less than {WINDOWS_PER_EPOCH} matchmaking windows "
        f"of {design.matchmaking_s:g} s: "
    )
    if design.mode == "diloco":
        steps = _local_steps_for(design, peers, least)
        return f"{said}collaboration.diloco.local_steps of at least {steps:,}"
    return f"{said}target batch (batch.samples) of at least {_batch_for(peers, least):,}"


def _much_averaging(design: Design, peers: Sequence[Machine]) -> str | None:
    figures = _figures(design, peers)
    if figures.share_averaging * _ROUNDED <= GOOD_SHARE:
        return None
    said = f"{figures.share_averaging:.0%} of the time goes into averaging: "
    averaging = figures.matchmaking_s + figures.allreduce_s
    wanted = averaging * (1 - GOOD_SHARE) / GOOD_SHARE
    if design.mode == "diloco":
        steps = _local_steps_for(design, peers, wanted)
        return f"{said}collaboration.diloco.local_steps of at least {steps:,}"
    if design.mode == "delayed":
        batch = _batch_for(peers, averaging * (1 - GOOD_SHARE))
        return f"{said}target batch (batch.samples) of at least {batch:,}, or diloco mode"
    delayed = _figures(replace(design, mode="delayed"), peers).share_averaging
    ways = [f"target batch (batch.samples) of at least {_batch_for(peers, wanted):,}"]
    if delayed <= GOOD_SHARE:
        ways.append(f"delayed mode ({delayed:.0%})")
    else:
        ways.append("diloco mode (many local steps between two rounds)")
    return said + ", or ".join(ways)


def _delayed_round(design: Design, peers: Sequence[Machine]) -> str | None:
    """A joiner needs a moment in which no round runs (the weights are known then)."""
    if design.mode != "delayed":
        return None
    compute, _ = _compute_s(design, peers)
    averaging = design.matchmaking_s + allreduce_s(design, peers)
    if compute >= WINDOWS_PER_EPOCH * averaging * _ROUNDED:
        return None
    batch = _batch_for(peers, WINDOWS_PER_EPOCH * averaging)
    return (
        f"delayed mode: an epoch of {compute:.3g} s is less than {WINDOWS_PER_EPOCH} times its "
        f"round of {averaging:.3g} s, and joiners wait for a moment between rounds: target batch "
        f"of at least {batch:,}"
    )


def _codec(design: Design, peers: Sequence[Machine]) -> str | None:
    """Fewer bytes a number, where the links are what takes the time."""
    now = allreduce_s(design, peers)
    much = _figures(design, peers).share_averaging > GOOD_SHARE
    if not much or now <= design.matchmaking_s or CODEC_BYTES[design.codec] == 1:
        return None
    name = "scaled-float16" if design.codec == "none" else "uniform8"
    then = allreduce_s(replace(design, codec=name), peers)
    loss = "" if name == "scaled-float16" else " (an error of 1.7 % in a pass)"
    return f"codec: swarm.codec = '{name}' averages in {then:.3g} s instead of {now:.3g} s{loss}"


def _bottleneck(design: Design, peers: Sequence[Machine]) -> str | None:
    """One slow link sets the pace of all: what a round is without it."""
    trainers = _trainers(peers)
    if len(trainers) <= _FEW_TRAINERS:
        return None
    slowest = min(trainers, key=lambda peer: min(peer.up_mbit, peer.down_mbit))
    rest = list(peers)
    rest.remove(slowest)
    if not _reachable(rest):
        return None
    with_it, without = _figures(design, peers), _figures(design, rest)
    if without.samples_per_s <= with_it.samples_per_s:
        return None
    link = min(slowest.up_mbit, slowest.down_mbit)
    return (
        f"the slowest link ({link:g} Mbit/s) costs more than its peer gives: without it "
        f"{without.samples_per_s:.3g} samples/s instead of {with_it.samples_per_s:.3g}"
    )


def _few_nodes(design: Design, peers: Sequence[Machine]) -> str | None:
    if _reachable(peers) == 1:
        return ("one peer alone is reachable: it reduces everything, and without it nobody "
                "averages: a second one with an open port")  # fmt: skip
    if len(_trainers(peers)) < _FEW_TRAINERS:
        return "too few peers: when one of two goes, the other trains alone"
    return None


def _no_donor(design: Design, peers: Sequence[Machine]) -> str | None:
    """Clients cannot be asked for weights, and an auxiliary has none."""
    if any(peer.role == "node" for peer in peers):
        return None
    return ("no peer that trains is reachable: nobody can give the weights to who joins late: one "
            "node with an open port")  # fmt: skip


def _microbatch(design: Design, peers: Sequence[Machine]) -> str | None:
    """Peers look around between two microbatches: one must not be longer than the window."""
    slowest = min(peer.rate for peer in _trainers(peers))
    if design.microbatch / slowest <= design.matchmaking_s:
        return None
    most = max(1, math.floor(slowest * design.matchmaking_s))
    return (
        f"the slowest peer computes a microbatch of {design.microbatch} in "
        f"{design.microbatch / slowest:.3g} s and misses the window of {design.matchmaking_s:g} s: "
        f"batch.microbatch of at most {most}, or a longer swarm.matchmaking_s"
    )


def _limits(design: Design, peers: Sequence[Machine]) -> str | None:
    allreduce = allreduce_s(design, peers)
    if allreduce <= design.allreduce_limit_s:
        return None
    return (
        f"a round takes {allreduce:.3g} s and is given up after {design.allreduce_limit_s:g}: "
        f"swarm.allreduce_s of at least {math.ceil(2 * allreduce)}"
    )


def _joining(design: Design, peers: Sequence[Machine]) -> str | None:
    """A state that took longer to download than an epoch is old when it is there."""
    seconds, epoch = download_s(design, peers), _figures(design, peers).epoch_s
    if seconds > design.download_limit_s:
        return (
            f"the slowest joiner downloads the state in {seconds:.3g} s and gives up after "
            f"{design.download_limit_s:g}: collaboration.download_timeout_s of at least "
            f"{math.ceil(2 * seconds)}"
        )
    if seconds <= epoch:
        return None
    return (
        f"the slowest joiner downloads the state in {seconds:.3g} s, longer than an epoch "
        f"({epoch:.3g} s), and is behind again: a longer epoch, or a faster link for a peer that "
        "joins late"
    )


_RULES: tuple[Callable[[Design, Sequence[Machine]], str | None], ...] = (
    _too_short, _much_averaging, _delayed_round, _codec, _bottleneck, _few_nodes, _no_donor,
    _microbatch, _limits, _joining,
)  # fmt: skip


def _batch_for(peers: Sequence[Machine], seconds: float) -> int:
    """Samples that all peers compute in so many seconds."""
    return math.ceil(round(seconds * sum(peer.rate for peer in peers), 6))


def _local_steps_for(design: Design, peers: Sequence[Machine], seconds: float) -> int:
    """Local steps with which the middle one of the peers computes for so long."""
    middle = statistics.median_high(peer.rate for peer in _trainers(peers))
    return math.ceil(round(seconds * middle / design.local_batch, 6))
