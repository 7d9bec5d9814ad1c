"""What `bench_swarm` prints: Markdown tables of its parts, and the targets."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.parallel_tables import markdown, target
from scripts.swarm_bench_links import LinksFound
from scripts.swarm_bench_rounds import RoundRow
from scripts.swarm_bench_share import ShareRow, hidden
from scripts.swarm_bench_soak import LONG_S, Memory, SoakFound

_BYTES_WITHIN = 0.02
_HIDDEN = 0.75
_FASTER = 0.20
_NOT_SLOWER = 1.03
_STALL_S = 30.0
_GROWTH = 0.10
"""Memory may grow by so much in an hour and still counts as flat."""


def rounds_table(rows: Sequence[RoundRow]) -> str:
    """One row a size, number of peers and codec."""
    heads = ["parameters", "peers", "codec", "search, s", "all-reduce, s", "least to most, s"]
    heads += ["averaged", "whole rounds", "sent a peer, MB", "formula, MB", "load"]
    return markdown(heads, [_round_cells(row) for row in rows])


def _round_cells(row: RoundRow) -> list[str]:
    return [
        f"{row.parameters:,}", str(row.peers), row.codec, f"{row.search_s:.2f}",
        f"{row.reduce_s:.2f}", f"{row.least_s:.2f} to {row.most_s:.2f}", f"{row.fraction:.1%}",
        f"{row.whole} of {row.rounds}", f"{row.sent_bytes / 1e6:.2f}",
        f"{row.formula_bytes / 1e6:.2f}", f"{row.load:.1f}",
    ]  # fmt: skip


def rounds_targets(rows: Sequence[RoundRow]) -> list[str]:
    """Every round is whole, and its bytes are the formula's. Seconds are no target."""
    rounds, whole = sum(row.rounds for row in rows), sum(row.whole for row in rows)
    lines = [target(whole == rounds, f"{whole} of {rounds} rounds whole, same bits everywhere")]
    offs = [abs(row.sent_bytes / row.formula_bytes - 1) for row in rows if row.whole]
    if offs:
        text = f"bytes: largest difference from the formula {max(offs):.1%} ({_BYTES_WITHIN:.0%})"
        lines.append(target(max(offs) <= _BYTES_WITHIN, text))
    return lines


def share_table(rows: Sequence[ShareRow]) -> str:
    """One row a mode."""
    heads = ["mode", "epochs x peers", "epoch, s", "compute, s", "search, s", "all-reduce, s"]
    heads += ["blocked, s", "blocked / epoch", "samples", "load"]
    cells = [
        [
            row.mode, str(row.epochs), f"{row.epoch_s:.2f}", f"{row.compute_s:.2f}",
            f"{row.search_s:.2f}", f"{row.reduce_s:.2f}", f"{row.blocked_s:.2f}",
            f"{row.blocked_share:.1%}", f"{row.samples:g}", f"{row.load:.1f}",
        ]
        for row in rows
    ]  # fmt: skip
    return markdown(heads, cells)


def share_targets(rows: Sequence[ShareRow]) -> list[str]:
    """Delayed mode hides most of what sync waits."""
    part = hidden(rows)
    text = f"delayed hides {part:.0%} of the seconds that block an epoch in sync ({_HIDDEN:.0%})"
    return [target(part >= _HIDDEN, text)]


def links_table(found: LinksFound) -> str:
    """One row a peer: equal shares, adaptive ones; then each adaptive round."""
    heads = ["link, Mbit/s", "equal, s", "adaptive, s", "difference", "share", "taken for, Mbit/s"]
    last = found.adaptive[-1]
    columns = zip(found.mbit, found.equal_s(), found.adaptive_s(), last.shares,
                  last.known_mbit, strict=True)  # fmt: skip
    cells = [
        [
            str(rate), f"{equal_s:.2f}", f"{adaptive_s:.2f}", f"{adaptive_s / equal_s - 1:+.1%}",
            f"{share:.3f}", "nobody knows" if known is None else f"{known:.1f}",
        ]
        for rate, equal_s, adaptive_s, share, known in columns
    ]  # fmt: skip
    rounds = ", ".join(f"{max(one.seconds):.2f}" for one in found.adaptive)
    learned = found.learned_after
    return (
        f"{found.parameters:,} parameters, float16, parts of at most "
        f"{found.part_bytes // 1024} KiB; "
        f"medians of {len(found.equal)} rounds with equal shares and of the adaptive ones after "
        "the rates were learned.\n\n"
        + markdown(heads, cells)
        + f"\n\nSlowest peer in each adaptive round, s: {rounds}. Learned after "
        + ("no number of rounds that left three to judge" if learned is None else f"{learned}")
        + "."
    )


def links_targets(found: LinksFound) -> list[str]:
    """Faster for all but the slowest link, which is not slower."""
    slowest = found.mbit.index(min(found.mbit))
    lines = []
    all_rounds = (*found.equal, *found.adaptive)
    whole = sum(one.whole for one in all_rounds)
    lines.append(target(whole == len(all_rounds), f"{whole} of {len(all_rounds)} rounds whole"))
    text = "the shares settled, with three rounds after"
    lines.append(target(found.learned_after is not None, text))
    pairs = zip(found.mbit, found.equal_s(), found.adaptive_s(), strict=True)
    for number, (rate, equal_s, adaptive_s) in enumerate(pairs):
        ratio = adaptive_s / equal_s
        if number == slowest:
            text = f"{rate} Mbit/s, the slowest: {ratio:.3f} of equal shares' time ({_NOT_SLOWER})"
            lines.append(target(ratio <= _NOT_SLOWER, text))
        else:
            text = f"{rate} Mbit/s: {1 - ratio:.1%} faster than equal shares ({_FASTER:.0%})"
            lines.append(target(1 - ratio >= _FASTER, text))
    return lines


def soak_table(found: SoakFound) -> str:
    """The figures, then what was done, then memory."""
    kills = sum(one.what.startswith("kill") for one in found.happenings)
    joins = len(found.happenings) - kills
    heads = ["minutes", "seed", "kills", "joins", "epochs", "median epoch, s", "longest, s"]
    heads += ["joined after, s (median, most)", "lost", "orphans", "load"]
    joined = "none"
    if found.joined_s:
        ordered = sorted(found.joined_s)
        joined = f"{ordered[len(ordered) // 2]:.1f}, {ordered[-1]:.1f}"
    cells = [
        f"{found.minutes:g}", str(found.seed), str(kills), str(joins), str(found.epochs),
        f"{found.median_gap_s:.2f}", f"{found.longest_gap_s:.2f}", joined, str(len(found.lost)),
        str(len(found.orphans)), f"{found.load:.1f}",
    ]  # fmt: skip
    parts = [markdown(heads, [cells])]
    if found.memory:
        heads = ["peer", "minutes weighed", "at first, MB", "at last, MB", "most, MB", "MB an hour"]
        parts.append(markdown(heads, [_memory_cells(one) for one in found.memory]))
    faults = [*found.lost, *found.short, *found.fell, *found.orphans]
    parts += ["\n".join(f"- {one}" for one in faults)] if faults else []
    return "\n\n".join(parts)


def _memory_cells(one: Memory) -> list[str]:
    sizes = [one.first_bytes, one.last_bytes, one.most_bytes, one.bytes_an_hour]
    return [one.peer, f"{one.minutes:.1f}", *(f"{size / 1e6:.1f}" for size in sizes)]


def soak_targets(found: SoakFound) -> list[str]:
    """No stall, no lost epoch, nothing left running, memory flat."""
    stall = f"longest time without an epoch {found.longest_gap_s:.1f} s ({_STALL_S:g} s)"
    lost = f"{len(found.lost)} lost epochs, {len(found.short)} with too few samples (0)"
    lines = [
        target(found.longest_gap_s <= _STALL_S, stall),
        target(not found.lost and not found.short, lost),
        target(not found.orphans, f"{len(found.orphans)} dead peers with processes left (0)"),
        target(not found.fell, f"{len(found.fell)} peers ended by themselves (0)"),
        target(not found.never_joined, f"{found.never_joined} joiners that never began (0)"),
    ]
    judged = [one for one in found.memory if 60 * one.minutes >= LONG_S]
    if not judged:
        lines.append(f"- not judged: memory; no peer was weighed for {LONG_S / 60:g} minutes")
    else:
        # The peer that was weighed longest says most about an hour.
        longest = max(judged, key=lambda one: one.minutes)
        text = (
            f"memory of {longest.peer}, weighed for {longest.minutes:.0f} minutes: "
            f"{longest.growth_an_hour:+.1%} an hour (at most {_GROWTH:+.0%})"
        )
        lines.append(target(longest.growth_an_hour <= _GROWTH, text))
    return lines
