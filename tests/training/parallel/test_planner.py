"""The ladder: rungs in their order, numbers that are those of the profile, what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest

from models.errors import UserError
from tests.conftest import REPOSITORY
from training.parallel import layout, ways
from training.parallel.automatic import applied, most_bytes, strategy_for
from training.parallel.ladder import Devices, Ladder, Rung
from training.parallel.memory import memory_of
from training.parallel.planner import Climber, climb, remedies
from training.parallel.profile import low_weights, profile_recipe
from training.parallel.timing import step_time
from training.parallel.traffic import Traffic
from training.parallel.units import Cut
from training.recipe import TrainRecipe, load_recipe

VOCAB = 2000
NAMES = ["microbatch", "recomputation", "zero1", "zero2", "zero3", "pipeline"]
_made: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def _traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests share their traces."""
    trace = ways.profile_recipe

    def once(recipe: TrainRecipe, vocab_size: int, *, microbatch: int, copies: int) -> Any:
        run = recipe.run
        key = (recipe.model, recipe.examples, run.precision, run.activation_checkpointing,
               low_weights(recipe, copies), vocab_size, microbatch)  # fmt: skip
        if str(key) not in _made:
            _made[str(key)] = trace(recipe, vocab_size, microbatch=microbatch, copies=copies)
        return _made[str(key)]

    monkeypatch.setattr(ways, "profile_recipe", once)


def decoder(*sets: str) -> TrainRecipe:
    return load_recipe(
        "decoder-small",
        ["examples.sequence_length=64", "batch.tokens=4096", "batch.microbatch=8", *sets],
    )


def plan(memory_bytes: float, *sets: str, ranks: int = 4, **more: Any) -> Ladder:
    return climb(decoder(*sets), Devices(1, ranks, int(memory_bytes), **more), VOCAB)


@pytest.fixture(scope="module")
def roomy() -> Ladder:
    return plan(1e12)


def named(ladder: Ladder, name: str) -> Rung:
    (found,) = (rung for rung in ladder.rungs if rung.name == name)
    return found


def test_every_rung_is_shown_and_the_first_that_fits_is_chosen(roomy: Ladder) -> None:
    assert [rung.name for rung in roomy.rungs] == ["data parallel", "bf16", *NAMES]
    assert roomy.chosen is roomy.rungs[0]
    assert all(rung.fits for rung in roomy.rungs)
    assert roomy.missing == ()
    assert named(roomy, "bf16").precision == named(roomy, "pipeline").precision == "bf16"
    assert named(roomy, "microbatch").microbatch == 4
    assert named(roomy, "recomputation").checkpointing
    assert not named(roomy, "zero1").checkpointing


def test_memory_of_a_rung_is_that_of_its_settings(roomy: Ladder) -> None:
    for name in ("data parallel", "recomputation", "zero3"):
        rung = named(roomy, name)
        recipe = applied(decoder(), rung)
        assert recipe.run.strategy == rung.strategy
        expected = memory_of(
            profile_recipe(recipe, VOCAB), strategy=rung.strategy, ranks=4, optimiser="adamw",
            microbatches=rung.microbatches,
        )  # fmt: skip
        assert rung.memory == expected.to_json()
        assert rung.total_bytes == expected.total


def test_less_memory_climbs_higher(roomy: Ladder) -> None:
    order = [rung.name for rung in roomy.rungs]
    # Just enough for each, and a byte less.
    sizes = sorted({rung.total_bytes for rung in roomy.rungs}, reverse=True)
    chosen = []
    for total in sizes:
        for memory in (total, total - 1):
            ladder = plan(memory / 0.95 + 1)
            for rung in ladder.rungs:
                assert rung.fits == (rung.total_bytes <= ladder.devices.usable_bytes)
            chosen.append(len(order) if ladder.chosen is None else order.index(ladder.chosen.name))
    assert chosen == sorted(chosen)
    assert len(set(chosen)) >= 4


def test_one_device_has_nobody_to_share_with() -> None:
    ladder = plan(1e12, ranks=1)
    assert ladder.rungs[0].name == "one device"
    assert ladder.rungs[0].strategy == "single"
    assert [rung.status for rung in ladder.rungs[-4:]] == ["left out"] * 4
    assert ladder.rungs[0].traffic is not None
    assert ladder.rungs[0].traffic.total == 0


def test_what_is_missing_where_nothing_fits() -> None:
    least = min(rung.total_bytes for rung in plan(1e12).rungs)
    ladder = plan(least / 2)
    assert ladder.chosen is None
    assert ladder.command(["x"]) is None
    assert all(rung.status == "too big" for rung in ladder.rungs)
    text = ladder.table()
    assert "nothing fits: the least is" in text
    assert "too many" in text
    assert "what would help: " in text
    assert "tensor parallelism" in text


@pytest.mark.parametrize("share", [0.95, 0.5, 0.05])
def test_what_is_said_to_help_does(share: float) -> None:
    sets = ("examples.sequence_length=256",)
    least = min(rung.total_bytes for rung in plan(1e6, *sets).rungs)
    devices = Devices(1, 4, int(share * least))
    climber = Climber(decoder(*sets), devices, VOCAB)
    rungs = climber.rungs()
    assert not any(rung.fits for rung in rungs)
    found = remedies(climber, rungs)
    assert plan(found.memory_bytes, *sets).chosen is not None
    assert plan(0.98 * found.memory_bytes, *sets).chosen is None
    if share == 0.95:
        assert found.devices is not None
        assert found.sequence_length is not None
    if found.devices is not None:
        assert plan(devices.memory_bytes, *sets, ranks=found.devices.ranks).chosen is not None
    if found.sequence_length is not None:
        shorter = f"examples.sequence_length={found.sequence_length}"
        assert plan(devices.memory_bytes, shorter).chosen is not None


class _Ways:
    """Says that so many bytes are needed, and a second for each example at once."""

    def __init__(self, climber: Climber, bytes_of: dict[int, int]) -> None:
        self.passes, self.bytes_of = climber.ways.passes, bytes_of
        self.examples = climber.ways.examples

    def in_parallel(self, settings: ways.Settings, _: Devices) -> ways.Way:
        size = self.bytes_of[settings.microbatch]
        return ways.Way(settings, 1, {"weights": size}, Traffic(), 1.0)


@pytest.mark.parametrize(
    ("bytes_of", "status", "microbatch"),
    [
        # One pass of 8 examples holds no gradients that others left: 4, 2 and 1 need more.
        ({16: 900, 8: 90, 4: 120, 2: 110, 1: 105}, "fits", 8),
        ({16: 900, 8: 101, 4: 120, 2: 110, 1: 105}, "too big", 8),
    ],
)
def test_all_of_a_rung_are_tried(bytes_of: dict[int, int], status: str, microbatch: int) -> None:
    climber = Climber(decoder("batch.microbatch=16"), Devices(1, 4, 106), VOCAB)
    climber.ways = _Ways(climber, bytes_of)  # type: ignore[assignment]
    sizes = [replace(climber._settings("ddp"), microbatch=one) for one in (16, 8, 4, 2, 1)]
    rung = climber._rung("microbatch", [sizes])
    assert (rung.status, rung.microbatch) == (status, microbatch)


def test_the_least_of_the_pipelines_is_told() -> None:
    """Of a ladder in which nothing fits: no other cut of the same settings needs less."""
    rung = named(plan(1e6, "run.pipeline.ranks=2"), "pipeline")
    assert rung.status == "too big"
    assert rung.stages is not None
    recipe = applied(decoder(), rung)
    profile = profile_recipe(recipe, VOCAB, copies=rung.stages.replicas)
    pipe = layout.pipe_for(recipe, 2, rung.microbatches, copies=rung.stages.replicas)
    units = len(profile.units)
    totals = [layout.fullest(profile, Cut((0, end, units)), pipe).total for end in range(1, units)]
    assert rung.total_bytes <= 1.001 * min(totals)
    assert rung.total_bytes == layout.smallest(profile, recipe, pipe)[1].total


def test_a_pipeline_that_gpipe_fits_with_larger_microbatches_only() -> None:
    """Each microbatch has receive buffers: many small ones need more than some larger ones."""
    rung = named(plan(1e12, "run.pipeline.schedule=gpipe", "run.pipeline.ranks=2"), "pipeline")
    assert rung.fits
    climber = Climber(decoder("run.pipeline.schedule=gpipe"), Devices(1, 4, 10**12), VOCAB)
    first = replace(climber._settings("pipeline"), precision="bf16")
    refused: list[int] = []
    pipeline = climber.ways.pipeline

    def small(settings: ways.Settings, *args: Any, **more: Any) -> ways.Way:
        if settings.microbatch < 4:
            refused.append(settings.microbatch)
            raise UserError("too big")
        return pipeline(settings, *args, **more)

    climber.ways.pipeline = small  # type: ignore[method-assign]
    found, _ = climber._of_stages(first, 2)
    assert refused == [1, 2]
    assert found is not None
    assert found.settings.microbatch >= 4


def test_a_cut_that_the_network_has_not_is_left_out() -> None:
    rung = named(plan(1e12, "run.pipeline.cut=tree"), "pipeline")
    assert rung.status == "left out"
    assert "choose optimal or uniform" in rung.why
    uniform = named(plan(1e12, "run.pipeline.cut=uniform", "run.pipeline.ranks=2"), "pipeline")
    assert uniform.stages is not None
    assert uniform.stages.bounds == (0, 3, 6)


def test_ranks_that_do_not_divide_the_devices_have_their_own_sentence() -> None:
    rung = named(plan(1e12, "run.pipeline.ranks=3"), "pipeline")
    assert (rung.status, rung.why) == (
        "left out", "run.pipeline.ranks = '3' does not divide 4 devices",
    )  # fmt: skip


def test_compiled_blocks_have_no_split_backward_pass() -> None:
    rung = named(plan(1e12, "run.pipeline.schedule=zbv", "run.compile=true"), "pipeline")
    assert rung.status == "left out"
    assert "run.compile=false" in rung.why


def test_absurd_numbers_of_devices_take_no_time() -> None:
    begin_s = time.process_time()
    plan(1e12, ranks=99_999 * 99_999)
    assert time.process_time() - begin_s < 10


def test_tied_gradients_count_once_in_time() -> None:
    """They are in the step of the pipeline; the rest of the gradients come after it."""
    settings = ("run.pipeline.ranks=2", "run.precision=bf16")
    rung = named(plan(1e12, *settings, peak_bf16=1e12, bandwidth_bytes_s=1e6, ranks=2), "pipeline")
    assert rung.traffic is not None
    assert rung.stages is not None
    assert rung.traffic.tied > 0
    assert rung.traffic.gradients == 0
    climber = Climber(decoder(*settings), Devices(1, 2, 10**12, 1e6, peak_bf16=1e12), VOCAB)
    wanted = ways.Settings("pipeline", "bf16", rung.checkpointing, rung.microbatch)
    profile = ways._timed(climber.ways.profile(wanted), 0.4e12)
    pipe = climber.ways.pipe(wanted, climber.devices, 2, shard=False)
    assert rung.step_s == pytest.approx(step_time(profile, Cut(rung.stages.bounds), pipe).step_s)


@pytest.mark.parametrize(
    ("name", "sets", "vocab", "devices", "chosen"),
    [
        ("albert-large", [], 30_000, Devices(1, 1, 80 * 2**30), "one device"),
        ("decoder-280m", [], 32_000, Devices(1, 1, 16 * 2**30), "microbatch"),
        ("decoder-280m", ["model.size=1.3b"], 32_000, Devices(1, 2, 24 * 2**30), "recomputation"),
        ("decoder-280m", ["model.size=8b"], 128_256, Devices(1, 8, 80 * 2**30), "zero2"),
    ],
)
def test_ladders_of_the_issue(
    name: str, sets: list[str], vocab: int, devices: Devices, chosen: str
) -> None:
    ladder = climb(load_recipe(name, sets), devices, vocab)
    assert ladder.chosen is not None
    assert ladder.chosen.name == chosen
    for rung in ladder.rungs:
        if rung.memory:
            assert rung.fits == (rung.total_bytes <= devices.usable_bytes)


def test_settings_that_the_recipe_has_are_not_tried_again() -> None:
    ladder = plan(1e12, "run.precision=bf16", "run.activation_checkpointing=true",
                  "batch.microbatch=1")  # fmt: skip
    left = {rung.name for rung in ladder.rungs if rung.status == "left out"}
    assert left == {"bf16", "microbatch", "recomputation"}
    assert all(rung.checkpointing for rung in ladder.rungs)


def test_time_is_work_by_speed() -> None:
    assert plan(1e12).rungs[0].step_s is None
    quick = plan(1e12, peak_bf16=2e12, peak_fp32=1e12, efficiency=0.5)
    first = quick.rungs[0]
    units = profile_recipe(decoder(), VOCAB).units
    flops = sum(unit.seconds for unit in units)
    # 64 examples of a step, 8 at once, on 4 devices: two passes each.
    assert first.step_s == pytest.approx(2 * flops / 0.5e12)
    assert named(quick, "recomputation").step_s > named(quick, "bf16").step_s  # type: ignore[operator]
    # Gradients of 5 M parameters through 1 kB/s: hours.
    slow = plan(1e12, peak_bf16=2e12, peak_fp32=1e12, efficiency=0.5, bandwidth_bytes_s=1e3)
    sent = slow.rungs[0].traffic
    assert sent is not None
    assert slow.rungs[0].step_s == pytest.approx(sent.total / 1e3, rel=1e-3)
    faster = slow.faster()
    assert faster is not None
    assert faster.name in ("zero1", "pipeline")


def test_the_pipeline_needs_as_many_microbatches_as_stages() -> None:
    few = plan(1e12, "batch.tokens=64")  # one example
    assert named(few, "pipeline").status == "left out"
    assert "microbatches" in named(few, "pipeline").why
    stages = named(plan(1e12, "run.pipeline.ranks=4"), "pipeline").stages
    assert stages is not None
    assert (stages.ranks, stages.replicas, stages.schedule) == (4, 1, "1f1b")
    assert stages.bounds[0] == 0
    assert stages.bounds[-1] == 6
    assert 0 < stages.bubble < 0.5


def test_command_and_json() -> None:
    ladder = plan(1e12, ranks=2)
    command = ladder.command(["decoder-small", "--set", "batch.tokens=4096"])
    assert command is not None
    assert command.startswith("gristmill train decoder-small --set batch.tokens=4096 --set run.s")
    assert command.endswith("--processes 2")
    several = replace(ladder, devices=replace(ladder.devices, nodes=3)).command(["decoder-small"])
    assert several is not None
    assert several.startswith("torchrun --nnodes 3 --nproc-per-node 2 ")
    value = json.loads(json.dumps(ladder.to_json()))
    assert value["chosen"] == "data parallel"
    assert value["faster"] is None  # no times
    alone = plan(1e12, ranks=1).to_json()
    assert [one["memory"] for one in alone["rungs"] if one["status"] == "left out"] == [None] * 4
    assert value["rungs"][0]["memory"]["total"] == ladder.rungs[0].total_bytes
    # The settings are such as a recipe takes, and say what the rung says.
    for rung in ladder.rungs:
        taken = decoder(*rung.overrides())
        assert taken == applied(decoder(), rung)


def test_auto_leaves_a_recipe_that_fits_as_it_is() -> None:
    for ranks, strategy in ((1, "single"), (2, "ddp")):
        rung = strategy_for(decoder(), ranks, 10**11, vocab_size=VOCAB)
        wanted = decoder(f"run.strategy={strategy}")
        assert applied(decoder(), rung) == wanted


def test_auto_climbs_without_touching_the_curve() -> None:
    base = decoder()
    whole = named(plan(1e12), "data parallel").total_bytes
    rung = strategy_for(base, 4, int(whole / 2), vocab_size=VOCAB)
    found = applied(base, rung)
    assert rung.total_bytes <= whole / 2
    assert found != base
    assert found.digest() == base.digest()
    with pytest.raises(UserError, match=r"does not fit on 4 x .* what would help") as error:
        strategy_for(base, 4, 10**6, vocab_size=VOCAB)
    assert "\n" not in str(error.value)


def test_auto_says_where_dropout_draws_other_masks() -> None:
    whole = named(plan(1e12, "model.dropout=0.1"), "data parallel").total_bytes
    rung = strategy_for(decoder("model.dropout=0.1"), 4, int(whole / 2), vocab_size=VOCAB)
    assert rung.microbatches > 2
    assert rung.why.endswith("dropout draws other masks than without this")
    plain = strategy_for(decoder(), 4, int(whole / 2), vocab_size=VOCAB)
    assert "dropout" not in plain.why
    roomy = strategy_for(decoder("model.dropout=0.1"), 4, 10**11, vocab_size=VOCAB)
    assert "dropout" not in roomy.why


@pytest.mark.parametrize("family", ["albert", "decoder"])
@pytest.mark.parametrize("more", [[], ["run.precision=bf16"], ["optimiser.name=lamb"]])
def test_the_bound_is_above_the_trace(family: str, more: list[str]) -> None:
    for sets in (["batch.microbatch=1"], ["batch.microbatch=8", "examples.sequence_length=256"]):
        recipe = decoder(f"model.family={family}", "model.dropout=0.1", *sets, *more)
        profile = profile_recipe(recipe, VOCAB)
        memory = memory_of(profile, strategy="ddp", ranks=2, optimiser=recipe.optimiser.name)
        assert memory.total < most_bytes(recipe, VOCAB)


@pytest.mark.slow  # half a minute
def test_seventy_billion_parameters_take_no_memory() -> None:
    program = """
import resource
from training.parallel.ladder import Devices
from training.parallel.planner import climb
from training.recipe import load_recipe

recipe = load_recipe("decoder-280m", ["model.size=70b"])
ladder = climb(recipe, Devices(16, 8, 80 * 2**30), 128_256)
assert ladder.parameters == 70_553_706_496
fits = [rung.name for rung in ladder.rungs if rung.fits]
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, *fits)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, text=True,
                          capture_output=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    peak_kib, *fits = done.stdout.split()
    assert int(peak_kib) < 1_500_000  # the weights alone would be 282 GB
    assert fits == ["zero3", "pipeline"]
