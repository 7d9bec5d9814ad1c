"""`gristmill plan`: how a recipe fits on devices that need not be here."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import re

from models.errors import UserError
from training.flops import peaks
from training.parallel.ladder import Devices
from training.recipe import TrainRecipe, load_recipe

_VOCAB_SIZE = 32_000
_UNITS = {
    "": 1.0, "B": 1.0,
    "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
    "KIB": 2.0**10, "MIB": 2.0**20, "GIB": 2.0**30, "TIB": 2.0**40,
}  # fmt: skip
_BIT_UNITS = {"MBIT": 1e6 / 8, "GBIT": 1e9 / 8}
_NUMBER = re.compile(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)")


def plan(arguments: argparse.Namespace) -> int:
    """Run the verb. 0 also when nothing fits: that is an answer."""
    recipe = load_recipe(arguments.recipe, list(arguments.set))
    devices = devices_of(arguments, recipe.run.precision)
    vocab_size = arguments.vocab_size or _vocab_size(recipe)
    from training.parallel.planner import climb  # noqa: PLC0415

    ladder = climb(recipe, devices, vocab_size)
    words = [arguments.recipe]
    stages = ladder.chosen is not None and ladder.chosen.stages is not None
    for override in arguments.set:
        if stages or not override.startswith("run.pipeline."):  # which other strategies refuse
            words += ["--set", override]
    command = ladder.command(words)
    if arguments.json:
        print(json.dumps(ladder.to_json() | {"command": command}))
        return 0
    print(ladder.table())
    if command is not None:
        print(command)
    return 0


def devices_of(arguments: argparse.Namespace, precision: str = "bf16") -> Devices:
    """The devices that the command line tells of. precision: the recipe's, which a single --peak
    is for. Raises UserError."""
    nodes, per_node = _counts(arguments.devices)
    inside = between = None
    if arguments.bandwidth is not None:
        inside = quantity("--bandwidth", arguments.bandwidth, per_second=True)
    if arguments.bandwidth_between is not None:
        between = quantity("--bandwidth-between", arguments.bandwidth_between, per_second=True)
    if between is not None and nodes == 1:
        raise UserError(
            f"--bandwidth-between '{arguments.bandwidth_between}', but --devices "
            f"'{arguments.devices}' are of one node: give NODESxDEVICES, as 2x8"
        )
    if between is not None and inside is None:
        raise UserError(
            f"--bandwidth-between '{arguments.bandwidth_between}' alone: give --bandwidth too, "
            "that inside a node"
        )
    name, bf16, fp32 = _peaks(arguments.device, arguments.peak, precision)
    efficiency = 0.4
    if arguments.efficiency is not None:
        efficiency = _number("--efficiency", arguments.efficiency)
        if not 0 < efficiency <= 1:
            raise UserError(
                f"--efficiency '{arguments.efficiency}' is no share of the peak: give a number "
                "above 0 and up to 1, as 0.4"
            )
        if bf16 is None and fp32 is None:
            raise UserError(
                f"--efficiency '{arguments.efficiency}' of what? give --device or --peak too"
            )
    return Devices(
        nodes=nodes,
        per_node=per_node,
        memory_bytes=int(quantity("--memory", arguments.memory)),
        bandwidth_bytes_s=inside,
        between_bytes_s=between,
        name=name,
        peak_bf16=bf16,
        peak_fp32=fp32,
        efficiency=efficiency,
    )


def quantity(option: str, text: str, *, per_second: bool = False) -> float:
    """Bytes, or bytes/s, of a text as '24GiB', '80e9', '450GB/s', '400Gbit/s'. Raises UserError."""
    units = _UNITS | (_BIT_UNITS if per_second else {})
    match = _NUMBER.fullmatch(text.strip().removesuffix("/s" if per_second else ""))
    number = -1.0
    if match is not None and match[2].upper() in units:
        number = _number(option, match[1]) * units[match[2].upper()]
    if not 1 <= number < 2**60:
        shown = "450GB or 400Gbit, each second" if per_second else "24GiB or 80e9"
        raise UserError(f"{option} '{text}' is no number of bytes: give one, as {shown}")
    return number


def _number(option: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{option} '{text}' is not a number")
    return number


def _counts(text: str) -> tuple[int, int]:
    """Nodes and devices of each."""
    match = re.fullmatch(r"(?:([1-9][0-9]{0,4})x)?([1-9][0-9]{0,4})", text.strip())
    if match is None:
        raise UserError(
            f"--devices '{text}' is no number of devices: give N, or NODESxDEVICES, as 16x8"
        )
    return int(match[1] or 1), int(match[2])


def _peaks(
    device: str | None, peak: str | None, precision: str
) -> tuple[str | None, float | None, float | None]:
    """Name and peaks for bf16 and fp32 in FLOP/s; a single --peak is that for `precision`."""
    if device is not None and peak is not None:
        raise UserError(f"--device '{device}' and --peak '{peak}': give one of the two")
    if peak is not None:
        values = [_number("--peak", text) for text in peak.split(",")]
        if min(values) <= 0 or len(values) > 2:
            raise UserError(
                f"--peak '{peak}' is no speed: give FLOP/s in the recipe's precision (312e12), or "
                "in bf16 and in fp32, as 312e12,19.5e12"
            )
        if len(values) == 2:
            return None, values[0], values[1]
        return None, *((values[0], None) if precision == "bf16" else (None, values[0]))
    if device is None:
        return None, None, None
    known = {one.name.upper(): one for one in peaks()}
    found = known.get(device.upper())
    if found is None:
        close = difflib.get_close_matches(device.upper(), known, n=1)
        hint = f"did you mean '{known[close[0]].name}'? " if close else ""
        names = ", ".join(one.name for one in known.values())
        raise UserError(f"--device '{device}' is not known: {hint}give one of {names}, or --peak")
    return found.name, found.bf16, found.fp32


def _vocab_size(recipe: TrainRecipe) -> int:
    """The tokenizer's, where the recipe names one."""
    if not recipe.model.tokenizer:
        return _VOCAB_SIZE
    from models.tokenizer import load_tokenizer  # noqa: PLC0415

    found: int = load_tokenizer(recipe.model.tokenizer).get_vocab_size()
    return found
