"""Mixes from end to end on a tiny crawl: what comes out, and that no end in between changes it."""

from __future__ import annotations

import json
import shutil
import signal
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from models import files
from models.errors import Fault, UserError
from tests.training import mix_runs, train_runs
from tests.training.mix_runs import MixInputs
from tests.training.train_runs import Moment, Runs
from training import run_manifest, trace
from training.domains import load_corpus, mixture
from training.mix import results
from training.mix.pool import Pool
from training.mix.run import Stopped, run_mix
from training.mix.stages import Catalogue, MixRun, Mixtures
from training.mixing_law import RunTable, read_table, write_table

LABELS = ("doremi", "proportional", "proxy-1", "uniform")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> MixInputs:
    return mix_runs.make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def finished(inputs: MixInputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mix that nothing disturbed, in this process."""
    output = tmp_path_factory.mktemp("finished") / "mix"
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.delenv("WORLD_SIZE", raising=False)
        manifest = run_mix(inputs.load(output), quiet=True)
    assert manifest == results.read(output)
    return output


@pytest.fixture
def runs(inputs: MixInputs, tmp_path: Path) -> Iterator[Runs]:
    folder = tmp_path / "logs"
    folder.mkdir()
    with train_runs.runs_of(folder, inputs) as found:
        yield found


def test_what_a_mix_leaves(inputs: MixInputs, finished: Path) -> None:
    assert sorted(path.name for path in finished.iterdir()) == [
        "manifest.json", "mix.json", "runs", "weights.json",
    ]  # fmt: skip
    assert sorted(path.name for path in (finished / "runs").iterdir()) == list(LABELS)
    manifest = results.read(finished)
    assert [(run.label, run.seed, run.run) for run in manifest.runs] == [
        (label, seed, f"runs/{folder}/seed-{seed}")
        for label, folder in (
            ("proportional", "proportional"), ("uniform", "uniform"),
            ("reference-1", "proportional"), ("proxy-1", "proxy-1"), ("doremi", "doremi"),
        )
        for seed in (0, 1)
    ]  # fmt: skip
    corpus = load_corpus(inputs.load(finished).data)
    shares = dict(zip(corpus.names, mixture(corpus, "proportional").tolist(), strict=True))
    found = {seed: trace.read_weights(finished / f"runs/proxy-1/seed-{seed}") for seed in (0, 1)}
    (entry,) = manifest.rounds
    assert entry.reference == shares
    assert entry.weights == {"0": found[0], "1": found[1]}
    assert manifest.stopped == "doremi.max_rounds = 1"
    for name in corpus.names:
        mean = (found[0][name] + found[1][name]) / 2
        assert manifest.weights[name] == pytest.approx(mean, abs=1e-12)
        spread = statistics.stdev([found[0][name], found[1][name]])
        (domain,) = (one for one in manifest.domains if one.name == name)
        assert domain.spread == pytest.approx(spread, abs=1e-12)
        assert domain.epochs is not None and 0 < domain.epochs < 1
    written = mixture(corpus, str(finished / "weights.json")).tolist()
    assert written == pytest.approx(list(manifest.weights.values()), abs=1e-12)
    for run in manifest.runs:
        of_run = run_manifest.read(finished / run.run)
        assert of_run.held_out is not None
        for name, entry_of_domain in of_run.held_out.domains.items():
            assert run.losses[name] == entry_of_domain.terms["next_token"].loss
        expected = {"uniform": {"bn": 0.5, "hi": 0.5}, "doremi": found[run.seed]}
        if run.label in expected:
            assert of_run.domains == pytest.approx(expected[run.label], abs=1e-12)
        assert of_run.recipe["run"]["seed"] == of_run.recipe["data"]["seed"] == run.seed


def test_a_finished_mix_has_nothing_to_do(
    inputs: MixInputs, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}
    assert run_mix(inputs.load(finished)) == results.read(finished)
    assert capsys.readouterr().err == "already finished: 10 runs\n"
    assert {path: path.stat().st_mtime_ns for path in before} == before
    with pytest.raises(UserError, match=r"holds another mix: schedule.steps = '7' is '6' there"):
        run_mix(inputs.load(finished, "schedule.steps=7"), quiet=True)
    with (
        pytest.raises(UserError, match=r"--jobs '2' with 2 ranks"),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("WORLD_SIZE", "2")
        run_mix(inputs.load(finished), jobs=2, quiet=True)


@pytest.mark.parametrize(
    "moment",
    [Moment("os.rename", r"runs/proxy-1/seed-1/checkpoints/step-00000004$"),
     Moment("os.rename", r"mix/manifest.json$")],
)  # fmt: skip
def test_a_killed_mix_goes_on_to_the_same_bytes(
    moment: Moment, runs: Runs, finished: Path, tmp_path: Path
) -> None:
    output = tmp_path / "mix"
    assert runs.start(output, kill_at=moment).end() == -signal.SIGKILL
    assert not (output / "manifest.json").exists()
    there = {
        path: path.stat().st_mtime_ns for path in output.glob("runs/*/*/model/model.safetensors")
    }
    assert len(there) == (3 if "proxy" in moment.pattern else 8)
    run = runs.finish(output)
    assert mix_runs.result(output) == mix_runs.result(finished)
    assert {path: path.stat().st_mtime_ns for path in there} == there
    said = run.said()
    assert said.count("was finished already") == len(there)
    if "proxy" in moment.pattern:
        assert "going on after step 2 of 6" in said
        assert "(8 of 8 runs)" in said


def test_two_jobs_are_stopped_and_go_on_to_the_same_bytes(
    runs: Runs, finished: Path, tmp_path: Path
) -> None:
    output = tmp_path / "mix"
    more = ("--jobs=2", "checkpoint.every=100")
    run = runs.start(output, *more)
    mix_runs.wait_for_run(run, "proxy-1/seed-0", 2)
    ours = mix_runs.workers(run.process.pid)
    assert len(ours) == 2
    run.send(signal.SIGTERM)
    assert run.end() == 0
    assert run.said().endswith("saved; run the same command again to go on\n")
    assert (output / "runs/proxy-1/seed-0/checkpoints/latest").exists()
    mix_runs.wait_until_gone(ours)
    assert not (output / "manifest.json").exists()

    run = runs.start(output, *more)
    mix_runs.wait_for_run(run, "doremi/seed-0", 1)
    ours = mix_runs.workers(run.process.pid)
    run.send(signal.SIGKILL)
    assert run.end() == -signal.SIGKILL
    assert len(ours) == 2
    mix_runs.wait_until_gone(ours)

    said = runs.finish(output, *more).said()
    assert "(8 of 8 runs)" in said
    assert "step" not in said.replace("largest change", "")  # the live line is of one job
    assert mix_runs.result(output) == mix_runs.result(finished)


def test_ctrl_c_saves_the_run_at_work(runs: Runs, tmp_path: Path) -> None:
    output = tmp_path / "mix"
    run = runs.start(output, "schedule.steps=60", "checkpoint.every=100")
    mix_runs.wait_for_run(run, "proportional/seed-0", 2)
    run.send(signal.SIGINT)
    assert run.end() == 0
    said = run.said()
    assert "SIGINT: saved after step" in said
    assert said.endswith("saved; run the same command again to go on\n")
    assert (output / "runs/proportional/seed-0/checkpoints/latest").exists()


def test_two_ranks_train_every_run_together(runs: Runs, finished: Path, tmp_path: Path) -> None:
    output = tmp_path / "mix"
    ranks = runs.start_ranks(2, output)
    assert [run.end() for run in ranks] == [0, 0], [run.said() for run in ranks]
    one, two = results.read(finished), results.read(output)
    assert two.weights == pytest.approx(one.weights, abs=1e-5)
    assert [run.label for run in two.runs] == [run.label for run in one.runs]
    for ours, theirs in zip(two.runs, one.runs, strict=True):
        assert ours.losses == pytest.approx(theirs.losses, abs=1e-4)
        assert ours.tokens == theirs.tokens
    assert ranks[1].said() == ""


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_fails_is_named(
    jobs: int, inputs: MixInputs, finished: Path, tmp_path: Path
) -> None:
    output = tmp_path / "mix"
    shutil.copytree(finished, output)
    (output / "manifest.json").unlink()
    shutil.rmtree(output / "runs/uniform")
    (output / "runs/uniform/seed-0/model").mkdir(parents=True)
    (output / "runs/uniform/seed-0/model/mine.bin").write_text("")
    with pytest.raises(
        UserError, match=r"^run 'uniform' of seed 0: output '.*' holds 'model/mine.bin', which no"
    ):
        run_mix(inputs.load(output), jobs=jobs, quiet=True)
    assert not (output / "manifest.json").exists()
    assert not (output / "run.lock").exists()


def test_a_worker_that_is_killed_is_told_of(inputs: MixInputs, tmp_path: Path) -> None:
    recipe = inputs.load(tmp_path / "mix", "schedule.steps=2000")
    shares = {"bn": 0.5, "hi": 0.5}
    catalogue = Catalogue(recipe, Mixtures(("bn", "hi"), shares, shares))
    run: MixRun = catalogue.baselines["proportional"][0]
    pool = Pool(1)
    try:
        pool.start(run)
        assert (pool.free, pool.busy) == (0, True)
        (worker,) = pool._workers
        worker._process.send_signal(signal.SIGKILL)
        outcomes = []
        while not outcomes:
            outcomes = pool.wait(60)
        assert (pool.free, pool.busy) == (1, False)
    finally:
        pool.close()
    (outcome,) = outcomes
    assert outcome.run is run
    assert isinstance(outcome.error, Fault)
    assert str(outcome.error) == "its process was ended by SIGKILL"


def test_specialists_rounds_and_a_reference_that_is_there(
    inputs: MixInputs, finished: Path, tmp_path: Path
) -> None:
    reference = finished / "runs/uniform/seed-1"
    fields = ("mix.seeds=[4]", "mix.specialists=1", "schedule.steps=3", "schedule.warmup_steps=1",
              "doremi.max_rounds=2", "mix.main_steps=2",
              f'doremi.reference_run="{reference}"')  # fmt: skip
    manifest = run_mix(inputs.load(tmp_path / "mix", *fields), quiet=True)
    first, second = manifest.rounds
    assert first.reference == {"bn": 0.5, "hi": 0.5}
    assert second.reference == first.weights["4"] == first.mean
    assert [run.label for run in manifest.runs] == [
        "proportional", "uniform", "proxy-1", "reference-2", "proxy-2", "doremi",
    ]  # fmt: skip
    assert [run.steps for run in manifest.runs] == [2, 2, 3, 3, 3, 2]
    assert [run.weights for run in manifest.specialists] == [
        {"bn": 1.0, "hi": 0.0}, {"bn": 0.0, "hi": 1.0},
    ]  # fmt: skip
    proxy = run_manifest.read(tmp_path / "mix/runs/proxy-1/seed-4").proxy
    digest = json.loads((tmp_path / "mix/mix.json").read_text())["reference_sha256"]
    assert proxy is not None and proxy.reference_sha256 == digest
    with pytest.raises(UserError, match=r"trained with examples.sequence_length = '32', not '16'"):
        run_mix(inputs.load(tmp_path / "new", *fields, "examples.sequence_length=16"), quiet=True)
    assert not (tmp_path / "new").exists()


def test_stopped_is_raised_for_callers_in_python(
    inputs: MixInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal that comes while a run is prepared stops that run before its first step."""
    from training import loop

    real = loop.prepare

    def prepare(recipe: object) -> object:
        signal.raise_signal(signal.SIGTERM)
        return real(recipe)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "prepare", prepare)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped):
        run_mix(inputs.load(tmp_path / "mix"), quiet=True)
    assert signal.getsignal(signal.SIGTERM) is before
    assert not list((tmp_path / "mix").rglob("step-*"))
    assert "training.mix.worker" not in sys.modules


LAW = ("mix.method=regress", "mix.seeds=[2]", "schedule.steps=3", "schedule.warmup_steps=1",
       "regress.runs=12", "regress.steps=2", "regress.bootstrap=3", "regress.regressor=exponential",
       "regress.folds=3", "checkpoint.every=100")  # fmt: skip


def test_a_law_over_small_runs_and_over_their_table(
    runs: Runs, inputs: MixInputs, tmp_path: Path
) -> None:
    """Killed before its main run and gone on with; then the same law from the table it wrote."""
    output = tmp_path / "mix"
    kill_at = Moment("os.rename", r"runs/regress/seed-2/model$")
    assert runs.start(output, *LAW, kill_at=kill_at).end() == -signal.SIGKILL
    said = runs.finish(output, *LAW).said()
    assert said.count("was finished already") == 12
    assert "(15 of 15 runs)" in said
    manifest = results.read(output)
    assert manifest.law is not None
    assert manifest.weights == dict(zip(("bn", "hi"), manifest.law.best, strict=True))
    assert [run.label for run in manifest.runs] == [
        "proportional", "uniform", *(f"small-{number:03d}" for number in range(12)), "regress",
    ]  # fmt: skip
    assert manifest.law.table_sha256 == files.sha256_file(output / "runs.csv")
    main = run_manifest.read(output / "runs/regress/seed-2")
    assert main.domains == pytest.approx(manifest.weights, abs=1e-12)
    assert [text for text in manifest.warnings if text.startswith("the law: ")] == [
        f"the law: {text}" for text in manifest.law.doubts
    ]

    table = read_table(output / "runs.csv")
    assert (table.domains, table.targets) == (("bn", "hi"), ("bn", "hi"))
    for number in range(12):
        small = run_manifest.read(output / f"runs/small-{number:03d}/seed-2")
        assert small.counts.steps == 2
        assert table.mixtures[number].tolist() == pytest.approx(list(small.domains.values()))
        assert small.held_out is not None
        losses = [one.terms["next_token"].loss for one in small.held_out.domains.values()]
        assert table.losses[number].tolist() == pytest.approx(losses)

    fields = (*LAW, f'regress.table="{output / "runs.csv"}"')
    again = run_mix(inputs.load(tmp_path / "again", *fields), quiet=True)
    assert again.weights == pytest.approx(manifest.weights, abs=1e-9)
    assert not list((tmp_path / "again/runs").glob("small-*"))
    assert again.law is not None and again.law.table_sha256 == manifest.law.table_sha256
    assert [run.label for run in again.runs] == ["proportional", "uniform", "regress"]
    with pytest.raises(UserError, match=r"regress.target = 'xx': choose mean, worst, bn, hi"):
        run_mix(inputs.load(tmp_path / "new", *fields, "regress.target=xx"))
    with pytest.raises(UserError, match=r"regress.folds = '13' of 12 runs"):
        run_mix(inputs.load(tmp_path / "new", *fields, "regress.folds=13"))
    with pytest.raises(UserError, match=r"other domains than the data, as 'bn': it needs 'bn/all'"):
        run_mix(inputs.load(tmp_path / "new", *fields, 'data.by=["bucket", "language"]'))
    with pytest.raises(UserError, match=r"would throw away '.*runs.csv', which the mix needs"):
        run_mix(inputs.load(output, *fields), restart=True)
    assert not (tmp_path / "new").exists()


def test_most_epochs_bound_the_mixture_of_the_main_run(inputs: MixInputs, tmp_path: Path) -> None:
    shares = np.linspace(0.05, 0.95, 12)
    losses = 2 + np.exp(-2 * shares)[:, None]
    table = RunTable(("hi", "bn"), ("hi",), np.column_stack([shares, 1 - shares]), losses)
    write_table(tmp_path / "mine.csv", table)
    fields = (*LAW, f'regress.table="{tmp_path / "mine.csv"}"', "regress.target=hi")
    manifest = run_mix(
        inputs.load(tmp_path / "mix", *fields, "regress.max_epochs=0.05"), quiet=True
    )
    assert manifest.law is not None
    by_name = dict(zip(manifest.law.domains, manifest.law.best, strict=True))
    bn, hi = manifest.domains
    # Without the bound all weight would go to hi, which its own loss falls with.
    assert hi.weight == by_name["hi"]
    assert 0.2 < hi.weight < 0.6
    assert hi.epochs == pytest.approx(0.05, rel=1e-4)
    assert bn.epochs is not None and bn.epochs < 0.05
    main = run_manifest.read(tmp_path / "mix/runs/regress/seed-2")
    assert main.domains["hi"] == pytest.approx(hi.weight)
    assert "regress.max_epochs holds down 'hi'" in manifest.law.notes
    assert max(manifest.law.spread) < 1e-3  # the bound holds in every refit, too
