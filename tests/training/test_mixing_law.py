"""Laws that are known come back, their lowest mixture is found, and noise is called noise."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.errors import UserError
from training import mixing_law, mixing_regressors
from training.mixing_law import RunTable, draw_mixtures, fit, read_regmix, read_table, write_table
from training.mixing_regressors import REGRESSORS, fit_exponential, fit_quadratic
from training.mixing_search import project

DOMAINS = ("code", "noise", "prose")
RATES = np.array([[-3.0, 0.2, -0.4], [0.1, -1.5, 0.3], [-0.5, 0.3, -2.0]])
SCALES, FLOORS = np.array([2.0, 0.6, 1.5]), np.array([1.2, 2.5, 1.9])


@pytest.fixture
def no_lightgbm(monkeypatch: pytest.MonkeyPatch) -> None:
    """LightGBM is not there: as for a user without the extra, and faster."""
    monkeypatch.setattr(mixing_law, "has_lightgbm", lambda: False)
    monkeypatch.setattr(mixing_regressors, "has_lightgbm", lambda: False)


def drawn(runs: int, domains: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.ones(domains), runs)


def law_losses(mixtures: np.ndarray) -> np.ndarray:
    """c + K exp(t.r) of each domain."""
    return FLOORS + SCALES * np.exp(mixtures @ RATES.T)


def clean_table(runs: int = 60) -> RunTable:
    mixtures = drawn(runs)
    return RunTable(DOMAINS, DOMAINS, mixtures, law_losses(mixtures))


def simplex_grid(step: int = 200) -> np.ndarray:
    return np.array(
        [(i, j, step - i - j) for i in range(step + 1) for j in range(step + 1 - i)]
    ) / step  # fmt: skip


@pytest.mark.parametrize("own", [None, 0])
def test_a_clean_exponential_law_comes_back(own: int | None) -> None:
    rates = np.array([-4.0, 0.5, -0.3, 1.0, -1.2])
    mixtures, fresh = drawn(40, 5), drawn(200, 5, seed=1)
    fitted = fit_exponential(mixtures, 1.7 + 0.8 * np.exp(mixtures @ rates), own, 0)
    wanted = 1.7 + 0.8 * np.exp(fresh @ rates)
    assert np.abs(fitted.predict(fresh) - wanted).max() < 1e-4
    assert fitted.values[-1] == pytest.approx(1.7, abs=1e-3)
    # K and the level of t are one number on the simplex: a + t_i is what the data tell.
    assert fitted.values[0] + fitted.values[1:-1] == pytest.approx(np.log(0.8) + rates, abs=1e-2)


def test_the_search_ends_where_the_penalised_cost_is_lowest() -> None:
    """Against a plain optimiser with numerical gradients, at the penalty that was chosen."""
    optimize = pytest.importorskip("scipy.optimize")
    mixtures = drawn(30)
    losses = law_losses(mixtures)[:, 0] + np.random.default_rng(2).normal(0, 0.1, 30)
    fitted = fit_exponential(mixtures, losses, None, 0)

    def cost(values: np.ndarray) -> float:
        errors = losses - values[-1] - np.exp(values[0] + mixtures @ values[1:-1])
        return float((errors**2).sum() / losses.var() + fitted.penalty * (values[1:-1] ** 2).sum())

    rng = np.random.default_rng(3)
    others = [optimize.minimize(cost, rng.normal(0, 1, 5), method="BFGS").fun for _ in range(10)]
    assert cost(fitted.values) <= min(others) + 1e-6 * min(others)


def test_a_clean_quadratic_comes_back() -> None:
    rng = np.random.default_rng(4)
    slopes, form = rng.normal(size=4), rng.normal(size=(4, 4))

    def losses(mixtures: np.ndarray) -> np.ndarray:
        roots = np.sqrt(mixtures)
        return 3.0 + roots @ slopes + np.einsum("ni,ij,nj->n", roots, form, roots)

    mixtures, fresh = drawn(60, 4), drawn(200, 4, seed=1)
    fitted = fit_quadratic(mixtures, losses(mixtures), 1, 0)
    assert np.abs(fitted.predict(fresh) - losses(fresh)).max() < 1e-4


def test_the_ridge_leaves_runs_out_as_it_says() -> None:
    """The closed form of leave-one-out picks what leaving each run out picks."""
    mixtures = drawn(25, 4)
    losses = mixtures @ [1.0, 2.0, 0.5, 3.0] + np.random.default_rng(5).normal(0, 0.3, 25)
    given = mixing_regressors.square_roots(mixtures)

    def error(penalty: float) -> float:
        """Slopes shrink towards 0 around the means of the whole table; the constant is free."""
        design = np.column_stack([np.ones(25), given - given.mean(0)])
        ridge = np.diag([0.0] + [penalty] * given.shape[1])
        total = 0.0
        for one in range(25):
            rest = np.arange(25) != one
            gram = design[rest].T @ design[rest] + ridge
            values = np.linalg.solve(gram, design[rest].T @ losses[rest])
            total += float((design[one] @ values - losses[one]) ** 2)
        return total

    chosen = fit_quadratic(mixtures, losses, None, 0).penalty
    near = [penalty for penalty in mixing_regressors._RIDGE if penalty > 1e-3]
    assert error(chosen) == pytest.approx(min(map(error, near)), rel=1e-6)


def test_spearman_by_hand() -> None:
    # Ranks 1 2 3 4 and 2 1 4 3: 1 - 6 * 4 / (4 * 15).
    assert mixing_law.spearman(
        np.array([1.0, 2.0, 5.0, 9.0]), np.array([0.2, 0.1, 7.0, 3.0])
    ) == pytest.approx(0.6)
    # Ranks 1.5 1.5 3 and 1 2 3: 1.5 / sqrt(1.5 * 2).
    assert mixing_law.spearman(
        np.array([4.0, 4.0, 6.0]), np.array([1.0, 2.0, 3.0])
    ) == pytest.approx(np.sqrt(3) / 2)
    assert mixing_law.spearman(np.ones(3), np.arange(3.0)) == 0.0


@pytest.mark.usefixtures("no_lightgbm")
def test_scores_are_those_of_predictions_for_runs_that_were_left_out() -> None:
    """A run whose loss is absurd cannot raise its own score: the naive loop says the same."""
    table = clean_table(24)
    losses = table.losses.copy()
    losses[3, 0] += 2.0
    table = RunTable(DOMAINS, DOMAINS, table.mixtures, losses)
    law = fit(table, target="code", folds=4, bootstrap=2, seed=7)
    fold = mixing_regressors.fold_numbers(24, 4, 7)
    assert sorted(np.bincount(fold)) == [6, 6, 6, 6]
    for name in ("exponential", "quadratic", "linear"):
        predicted = np.empty(24)
        for number in range(4):
            part = fold != number
            model = REGRESSORS[name](table.mixtures[part], losses[part, 0], 0, 7)
            predicted[~part] = model.predict(table.mixtures[~part])
        assert law.scores[name] == pytest.approx(mixing_law.spearman(predicted, losses[:, 0]))
    assert law.regressor == max(("exponential", "quadratic"), key=law.scores.__getitem__)


@pytest.mark.parametrize("target", ["mean", "worst"])
@pytest.mark.usefixtures("no_lightgbm")
def test_the_best_mixture_is_that_of_a_grid(target: str) -> None:
    law = fit(clean_table(), target=target, regressor="exponential", bootstrap=5)
    grid = simplex_grid()
    losses = law_losses(grid).mean(1) if target == "mean" else law_losses(grid).max(1)
    assert np.abs(law.best - grid[losses.argmin()]).max() < 1e-2
    assert law.predicted == pytest.approx(losses.min(), abs=2e-3)
    assert law.best.sum() == pytest.approx(1.0, abs=1e-9)
    assert law.spread.max() < 1e-2 and law.predicted_spread < 1e-3


@pytest.mark.usefixtures("no_lightgbm")
def test_the_best_mixture_of_one_law_is_its_steepest_domain() -> None:
    law = fit(clean_table(), target="code", regressor="exponential", bootstrap=2)
    assert law.best == pytest.approx([1.0, 0.0, 0.0], abs=1e-6)
    assert law.predicted == pytest.approx(1.2 + 2 * np.exp(-3.0), abs=1e-3)


@pytest.mark.parametrize("target", ["mean", "worst", "code"])
@pytest.mark.usefixtures("no_lightgbm")
def test_limits_hold_and_the_rest_is_the_best_within_them(target: str) -> None:
    limits = np.array([0.3, 0.5, 0.35])
    law = fit(clean_table(), target=target, regressor="exponential", bootstrap=2, limits=limits)
    assert (law.best <= limits + 1e-9).all() and (law.best >= 0).all()
    grid = simplex_grid()
    grid = grid[(grid <= limits + 1e-12).all(1)]
    each = law_losses(grid)
    losses = {"mean": each.mean(1), "worst": each.max(1), "code": each[:, 0]}[target]
    assert np.abs(law.best - grid[losses.argmin()]).max() < 1e-2


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 6))
def test_projected_mixtures_are_the_nearest(seed: int, domains: int) -> None:
    rng = np.random.default_rng(seed)
    highest = rng.uniform(1 / domains, 1, domains)
    point = rng.normal(0.3, 1, domains)
    found = project(point[None], highest)[0]
    assert found.sum() == pytest.approx(1.0, abs=1e-9)
    assert (found >= 0).all() and (found <= highest).all()
    others = rng.dirichlet(np.ones(domains), 200)
    others = others[(others <= highest).all(1)]
    distances = ((others - point) ** 2).sum(1)
    assert (((found - point) ** 2).sum() <= distances + 1e-9).all()


@pytest.mark.usefixtures("no_lightgbm")
def test_a_clean_law_leaves_no_doubt_and_noise_does() -> None:
    assert fit(clean_table(), regressor="exponential").doubts == ()
    mixtures = drawn(60)
    noise = np.random.default_rng(1).normal(3.0, 0.1, (60, 3))
    doubts = fit(RunTable(DOMAINS, DOMAINS, mixtures, noise), regressor="exponential").doubts
    assert any(
        re.search(r"rank correlation of 'exponential' is -?0\.\d+, below", d) for d in doubts
    )
    assert any("may be none: its 95 % interval" in doubt for doubt in doubts)
    assert all("\n" not in doubt for doubt in doubts)


@pytest.mark.usefixtures("no_lightgbm")
def test_few_runs_and_a_best_mixture_far_from_them_are_doubted() -> None:
    near = 0.05 * drawn(12) + 0.95 * np.array([0.1, 0.8, 0.1])
    table = RunTable(DOMAINS, DOMAINS, near, law_losses(near))
    doubts = fit(table, regressor="exponential", bootstrap=5).doubts
    assert any(doubt.startswith("12 runs are few for a law with 5 parameters") for doubt in doubts)
    assert any("far from every run" in doubt for doubt in doubts)


@pytest.mark.usefixtures("no_lightgbm")
def test_a_best_mixture_that_is_nowhere_in_particular_is_doubted() -> None:
    """All domains alike: the optimum is uniform, the best run is as good as the law's best."""
    mixtures = drawn(60)
    losses = 2 + np.exp(-2 * mixtures) + np.random.default_rng(3).normal(0, 0.2, (60, 3))
    doubts = fit(RunTable(DOMAINS, DOMAINS, mixtures, losses), regressor="exponential").doubts
    assert any("cannot be told from the uniform mixture" in doubt for doubt in doubts)
    assert any("gain over the best run seen" in doubt for doubt in doubts)


@pytest.mark.usefixtures("no_lightgbm")
def test_a_seed_gives_one_law_and_it_is_plain_json() -> None:
    table = clean_table(20)
    noisy = RunTable(
        DOMAINS, DOMAINS, table.mixtures,
        table.losses + np.random.default_rng(0).normal(0, 0.05, (20, 3)),
    )  # fmt: skip
    first, again, other = (fit(noisy, bootstrap=4, seed=seed) for seed in (3, 3, 4))
    assert json.dumps(first.to_json(), allow_nan=False) == json.dumps(again.to_json())
    assert first.to_json()["spread"] != other.to_json()["spread"]
    assert first.notes == (
        "LightGBM is not installed, so it was not compared: pip install 'gristmill[mix]'",
    )
    assert len(first.to_json()["fitted"]) == len(first.to_json()["observed"]) == 20


@pytest.mark.usefixtures("no_lightgbm")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regressor": "lightgbm"}, "needs LightGBM, which is not installed: pip install"),
        ({"regressor": "cubic"}, "no regressor 'cubic': choose auto, exponential, quadratic"),
        ({"target": "poems"}, "no loss 'poems' in the table of runs: choose mean, worst, code"),
        ({"folds": 61}, "'61' folds for 60 runs: give 2 to 60"),
        ({"bootstrap": 1}, "'1' refits of the bootstrap: give 2 or more"),
        ({"limits": [0.3, 0.3, 0.3]}, r"limits '\[0.3, 0.3, 0.3\]' leave no mixture"),
        ({"limits": [1.0, 1.0]}, "give one for each of the 3 domains"),
    ],
)
def test_mistakes_are_told_in_one_line(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        fit(clean_table(), **options)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_losses_that_never_change_are_refused() -> None:
    with pytest.raises(UserError, match="the loss 'mean' is '2' in all runs: nothing to fit"):
        fit(RunTable(DOMAINS, DOMAINS, drawn(20), np.full((20, 3), 2.0)))


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    mixtures = drawn(9)
    table = RunTable(DOMAINS, ("a/b, c", "mean loss"), mixtures, law_losses(mixtures)[:, :2])
    write_table(tmp_path / "runs.csv", table)
    found = read_table(tmp_path / "runs.csv")
    assert (found.domains, found.targets) == (table.domains, table.targets)
    np.testing.assert_array_equal(found.losses, table.losses)
    np.testing.assert_allclose(found.mixtures, table.mixtures, rtol=1e-15)


ROW = "1,0.2,0.8,3.5\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run,mixture/a,mixture/b\n1,0.2,0.8\n", "has no column 'loss/NAME'"),
        ("run,loss/a\n1,0.2\n", "has no column 'mixture/NAME'"),
        ("run,mixture/a,mixture/b,loss/a\n", "has no runs"),
        ("run,mixture/a,mixture/a,loss/a\n" + ROW, "has the column 'mixture/a' twice"),
        ("run,mixture/a,mixture/b,loss/a\n1,0.2,0.8\n", "run 1: '3' values for 4 columns"),
        ("run,mixture/a,mixture/b,loss/a\n" + ROW + "2,0.2,0.7,3\n", "run 2 .* sums to '0.9'"),
        ("run,mixture/a,mixture/b,loss/a\n1,0.2,0.8,nan\n", "the loss of 'a' is 'nan'"),
        ("run,mixture/a,mixture/b,loss/a\n1,1.2,-0.2,3\n", "the mixture of 'b' is '-0.2'"),
        ("run,mixture/a,mixture/b,loss/a\n1,0.2,much,3\n", "'much' in the column of 'b'"),
        ("run,mixture/a,mixture/b,loss/a\n" + 3 * ROW, "has '3' runs, fewer than the 4 param"),
    ],
)
def test_a_damaged_table_is_told_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        read_table(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_no_table_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the table of runs"):
        read_table(tmp_path / "none.csv")


def test_rounded_mixtures_are_made_to_sum_to_one() -> None:
    table = RunTable(("a", "b"), ("a",), np.array([[0.333, 0.665]]), np.array([[1.0]]))
    np.testing.assert_allclose(table.mixtures, [[0.333 / 0.998, 0.665 / 0.998]])


def test_mixtures_are_drawn_around_the_prior() -> None:
    prior = np.array([0.5, 0.3, 0.2, 0.0])
    found = draw_mixtures(prior, 4_000, seed=1, concentration=(0.1, 5.0))
    np.testing.assert_allclose(found.sum(1), 1)
    np.testing.assert_allclose(found.mean(0), prior, atol=0.02)
    assert not found[:, 3].any()
    # Variance of a Dirichlet weight: p (1 - p) / (strength + 1), over log-uniform strengths.
    strengths = np.exp(np.linspace(np.log(0.1), np.log(5.0), 1_000))
    wanted = prior * (1 - prior) * (1 / (1 + strengths)).mean()
    np.testing.assert_allclose(found.var(0), wanted, rtol=0.06)
    np.testing.assert_array_equal(
        found, draw_mixtures(prior, 4_000, seed=1, concentration=(0.1, 5.0))
    )


def test_lightgbm_learns_a_law_and_is_the_same_for_a_seed() -> None:
    pytest.importorskip("lightgbm")
    mixtures, fresh = drawn(200), drawn(100, seed=1)
    losses = law_losses(mixtures)[:, 0]
    fitted = REGRESSORS["lightgbm"](mixtures, losses, 0, 0)
    predicted = fitted.predict(fresh)
    assert mixing_law.spearman(predicted, law_losses(fresh)[:, 0]) > 0.98
    np.testing.assert_array_equal(fitted.again(mixtures, losses).predict(fresh), predicted)


def test_lightgbm_finds_a_mixture_near_the_best() -> None:
    pytest.importorskip("lightgbm")
    law = fit(clean_table(100), regressor="lightgbm", bootstrap=3, limits=[0.6, 0.6, 0.6])
    assert set(law.scores) == {"exponential", "quadratic", "lightgbm", "linear"}
    losses = law_losses(np.vstack([law.best, simplex_grid(20)])).mean(1)
    assert losses[0] <= np.quantile(losses[1:], 0.1)
    assert (law.best <= 0.6).all() and law.best.sum() == pytest.approx(1)


@pytest.fixture(scope="session")
def regmix(data_dir: Path) -> Path:
    if not (data_dir / "regmix").is_dir():
        pytest.skip(f"no RegMix runs in '{data_dir}'")
    return data_dir / "regmix"


def test_regmix_is_read_whole(regmix: Path) -> None:
    train, large = read_regmix(regmix, "train_1m"), read_regmix(regmix, "test_1B")
    assert train.mixtures.shape == (512, 17) and train.losses.shape == (512, 13)
    assert large.mixtures.shape == (64, 17) and large.losses.shape == (64, 13)
    assert (train.domains, train.targets) == (large.domains, large.targets)
    column = train.targets.index("pile_cc")
    assert train.losses[0, column] == 5.169477939605713  # its first line
    assert large.losses[0, column] == 2.932116032
    assert large.mixtures[0, train.domains.index("pile_cc")] == pytest.approx(0.27, abs=1e-3)
    with pytest.raises(UserError, match="no split 'test_7B' in RegMix: choose train_1m"):
        read_regmix(regmix, "test_7B")


@pytest.mark.parametrize("subset", ["first", "drawn"])
def test_64_small_runs_rank_the_1b_models(regmix: Path, subset: str) -> None:
    train, large = read_regmix(regmix, "train_1m"), read_regmix(regmix, "test_1B")
    runs = np.arange(64) if subset == "first" else np.random.default_rng(0).permutation(512)[:64]
    column, own = train.targets.index("pile_cc"), train.domains.index("pile_cc")
    fitted = fit_exponential(train.mixtures[runs], train.losses[runs, column], own, 0)
    assert mixing_law.spearman(fitted.predict(large.mixtures), large.losses[:, column]) >= 0.97
