"""The ladder of a plan: its rungs in numbers and words, and the settings that the first one that
fits asks for.

`parallel.planner` climbs it. No torch here.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from training.parallel.traffic import Traffic

PLANNED = 0.95
"""Share of a device's memory that a plan may fill: what is left is for the allocator's gaps, the
libraries' own buffers and the error of the prediction."""
_FASTER = 0.9
"""A later rung is worth a note when its step takes less than this share of the chosen one's."""

Status = Literal["fits", "too big", "left out"]


def usable(memory_bytes: int) -> int:
    """What a plan may fill of a device's memory."""
    return int(PLANNED * memory_bytes)


@dataclass(frozen=True)
class Devices:
    """What a plan is made for."""

    nodes: int
    per_node: int
    memory_bytes: int
    """Of each device."""
    bandwidth_bytes_s: float | None = None
    """That a device sends to another of its node; None: unknown, transfers take no time."""
    between_bytes_s: float | None = None
    """That a device sends to one of another node; None: as inside."""
    name: str | None = None
    peak_bf16: float | None = None
    """FLOP/s; None: of rungs that compute so no times are predicted."""
    peak_fp32: float | None = None
    efficiency: float = 0.4
    """Share of the peak that a training step reaches."""

    @property
    def ranks(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.per_node

    @property
    def usable_bytes(self) -> int:
        """Of each device's memory."""
        return usable(self.memory_bytes)

    def speed(self, precision: str) -> float | None:
        """FLOP/s of a device at work."""
        peak = self.peak_bf16 if precision == "bf16" else self.peak_fp32
        return None if peak is None else peak * self.efficiency

    def bandwidth(self, *, inside: bool) -> float | None:
        """Bytes/s between devices of one node, or of two."""
        if inside or self.between_bytes_s is None:
            return self.bandwidth_bytes_s
        return self.between_bytes_s


@dataclass(frozen=True)
class Stages:
    """The pipeline of a rung."""

    ranks: int
    """Of one pipeline."""
    replicas: int
    """Pipelines side by side."""
    schedule: str
    stages_per_rank: int
    shard: bool
    bounds: tuple[int, ...]
    """First unit of each stage, and the number of units."""
    bubble: float
    """Share of the ranks' time that is idle."""


@dataclass(frozen=True)
class Rung:
    """One step of the ladder."""

    name: str
    strategy: str
    precision: str
    microbatch: int
    """Examples."""
    microbatches: int
    """That a device computes in a step."""
    checkpointing: bool
    status: Status
    why: str
    """One line: why it fits, or does not."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the fullest device at its peak, by kind."""
    traffic: Traffic | None = None
    step_s: float | None = None
    stages: Stages | None = None

    @property
    def total_bytes(self) -> int:
        """Memory of all kinds."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether a device has room for it."""
        return self.status == "fits"

    def overrides(self) -> list[str]:
        """Settings of the recipe that this rung decides."""
        found = [
            f"run.strategy={self.strategy}",
            f"run.precision={self.precision}",
            f"run.activation_checkpointing={str(self.checkpointing).lower()}",
            f"batch.microbatch={self.microbatch}",
        ]
        if self.stages is not None:
            found += [
                f"run.pipeline.ranks={self.stages.ranks}",
                f"run.pipeline.schedule={self.stages.schedule}",
                f"run.pipeline.stages_per_rank={self.stages.stages_per_rank}",
                f"run.pipeline.shard={str(self.stages.shard).lower()}",
                "run.pipeline.costs=operations",  # those that this rung was cut by
            ]
        return found


@dataclass(frozen=True)
class Ladder:
    """All rungs for one recipe and one set of devices."""

    recipe: str
    network: str
    """Family and size."""
    parameters: int
    vocab_size: int
    examples: int
    """In a step."""
    sequence_length: int
    devices: Devices
    rungs: tuple[Rung, ...]
    missing: tuple[str, ...] = ()
    """Where nothing fits: by how much, and what would help."""

    @property
    def chosen(self) -> Rung | None:
        """The first rung that fits."""
        return next((rung for rung in self.rungs if rung.fits), None)

    def faster(self) -> Rung | None:
        """A later rung that fits and is predicted to be clearly faster than the chosen one."""
        chosen = self.chosen
        if chosen is None or chosen.step_s is None:
            return None
        timed = [rung for rung in self.rungs if rung.fits and rung.step_s is not None]
        best = min(timed, key=lambda rung: rung.step_s or 0.0)
        assert best.step_s is not None
        return best if best.step_s < _FASTER * chosen.step_s else None

    def command(self, words: Sequence[str]) -> str | None:
        """The command line that follows the chosen rung. words: RECIPE and --set of the plan."""
        if self.chosen is None:
            return None
        train = ["train", *words]
        for setting in self.chosen.overrides():
            train += ["--set", setting]
        train += ["--data", "MINED", "--tokenizer", "TOKENIZER", "--output", "RUN"]
        if self.devices.nodes == 1:
            many = ["--processes", str(self.devices.per_node)] if self.devices.per_node > 1 else []
            return shlex.join(["gristmill", *train, *many])
        launcher = ["torchrun", "--nnodes", str(self.devices.nodes), "--nproc-per-node",
                    str(self.devices.per_node), "--rdzv-backend", "c10d", "--rdzv-endpoint",
                    "FIRST_NODE:29500", "-m", "scripts.cli"]  # fmt: skip
        return shlex.join([*launcher, *train])

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        chosen, faster = self.chosen, self.faster()
        return {
            "recipe": self.recipe,
            "network": self.network,
            "parameters": self.parameters,
            "vocab_size": self.vocab_size,
            "examples_per_step": self.examples,
            "sequence_length": self.sequence_length,
            "devices": asdict(self.devices) | {"usable_bytes": self.devices.usable_bytes},
            "rungs": [
                asdict(rung) | {"memory": {**rung.memory, "total": rung.total_bytes}
                                if rung.memory else None,
                                "sent_bytes": rung.traffic and rung.traffic.total}
                for rung in self.rungs
            ],
            "chosen": chosen and chosen.name,
            "faster": faster and faster.name,
            "settings": chosen.overrides() if chosen else [],
            "missing": list(self.missing),
        }  # fmt: skip

    def table(self) -> str:
        """For people."""
        devices = self.devices
        lines = [
            f"network   {self.network}, {self.parameters:,} parameters with a vocabulary of "
            f"{self.vocab_size:,}",
            f"step      {self.examples:,} examples of {self.sequence_length:,} tokens",
            f"devices   {_devices(devices)}",
            "",
            "memory of the fullest device, what a device sends in a step, predicted step",
            *_rows(self.rungs),
            "",
        ]
        chosen = self.chosen
        if chosen is None:
            return "\n".join([*lines, *self.missing])
        lines.append(f"first that fits: {_described(chosen)}")
        if chosen.stages is not None:
            lines.append(f"stages: units {_stages(chosen.stages)}")
        faster = self.faster()
        if faster is not None:
            lines.append(
                f"faster by the prediction: {_described(faster)}: {seconds(faster.step_s)} instead "
                f"of {seconds(chosen.step_s)} a step"
            )
        return "\n".join(lines)


def size(count: float) -> str:
    """Bytes of memory as people read them: powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return _three(count, unit)
        count /= 1024
    return _three(count, "TiB")


def sent(count: float) -> str:
    """Bytes on a wire: powers of 1000, as bandwidths."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return _three(count, unit)
        count /= 1000
    return _three(count, "TB")


def seconds(count: float | None) -> str:
    """A step's time; '-' where nothing is predicted."""
    if count is None:
        return "-"
    if count < 1:
        return _three(count * 1000, "ms")
    return _three(count, "s")


def _three(count: float, unit: str) -> str:
    """Three digits, more before the point."""
    digits = 0 if count >= 100 or unit == "B" else 1 if count >= 10 else 2
    return f"{count:.{digits}f} {unit}"


def _devices(devices: Devices) -> str:
    shape = f"{devices.nodes} x {devices.per_node}" if devices.nodes > 1 else f"{devices.per_node}"
    text = (
        f"{shape} of {size(devices.memory_bytes)}, {size(devices.usable_bytes)} of it planned with"
    )
    if devices.bandwidth_bytes_s is not None:
        text += f"; {sent(devices.bandwidth_bytes_s)}/s"
        if devices.nodes > 1:
            between = devices.bandwidth(inside=False)
            text += f", {sent(between or 0.0)}/s between nodes"
    peaks = {"bf16": devices.peak_bf16, "fp32": devices.peak_fp32}
    told = [f"{peak / 1e12:,.4g} ({name})" for name, peak in peaks.items() if peak is not None]
    if told:
        name = f"{devices.name} at " if devices.name else ""
        text += f"; {name}{devices.efficiency:.0%} of {' and '.join(told)} TFLOP/s"
    else:
        text += "; no times without --device or --peak"
    return text


def _rows(rungs: Sequence[Rung]) -> list[str]:
    kinds = [kind for kind in _kinds(rungs) if any(rung.memory.get(kind) for rung in rungs)]
    head = ["", "precision", "batch", *kinds, "total", "sent", "step"]
    body = []
    for number, rung in enumerate(rungs, start=1):
        cells = [f"{number} {rung.name}"]
        if rung.memory:
            batch = f"{rung.microbatches} x {rung.microbatch}{'*' * rung.checkpointing}"
            cells += [rung.precision, batch]
            cells += [size(rung.memory.get(kind, 0)) for kind in kinds]
            cells += [size(rung.total_bytes), sent(rung.traffic.total if rung.traffic else 0)]
            cells.append(seconds(rung.step_s))
        body.append(cells)
    widths = [
        max(len(row[column]) for row in [head, *body] if len(row) > column)
        for column in range(len(head))
    ]
    lines = [_line(head, widths)]
    for rung, cells in zip(rungs, body, strict=True):
        lines += [_line(cells, widths), f"    {rung.status}: {rung.why}"]
    if any(rung.memory and rung.checkpointing for rung in rungs):
        lines.append("* blocks are recomputed in the backward pass")
    return lines


def _kinds(rungs: Sequence[Rung]) -> list[str]:
    return list(dict.fromkeys(kind for rung in rungs for kind in rung.memory))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(cells, widths, strict=False)
    text = f"{first[0]:<{first[1]}}" + "".join(f"  {cell:>{width}}" for cell, width in others)
    return text.rstrip()


def _described(rung: Rung) -> str:
    words = [rung.name]
    if rung.stages is not None:
        stages = rung.stages
        words.append(
            f"{stages.ranks} ranks x {stages.replicas} side by side, {stages.schedule}, "
            f"bubble {stages.bubble:.0%}{', sharded' * stages.shard}"
        )
    many = "microbatches" if rung.microbatches > 1 else "microbatch"
    words.append(f"{rung.microbatches} {many} of {rung.microbatch} a device")
    if rung.checkpointing:
        words.append("recomputation")
    return ", ".join(words)


def _stages(stages: Stages) -> str:
    pairs = zip(stages.bounds[:-1], stages.bounds[1:], strict=True)
    return " | ".join(str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in pairs)
