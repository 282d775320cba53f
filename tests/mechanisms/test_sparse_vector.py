"""The sparse vector technique: equal to the papers' loops, its loss measured, its mutants caught."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2_contingency, ks_2samp

from fed_dp.audit.exact import sparse_vector_losses
from fed_dp.errors import PrivacyError
from fed_dp.mechanisms import SimulationNoise
from tests.conftest import some
from tests.mechanisms import reference
from tests.mechanisms.privacy_loss import Spy, empirical_loss, mutant

vectors = import_module("fed_dp.mechanisms.sparse_vector")
laplaces = import_module("fed_dp.mechanisms.laplace")

GAMMA, TAU, COUNT, EPSILON = 0.5, 0.2, 3, 2.0
FORMS = {
    "proved": lambda module: module.sparse_vector,
    "proved, equal split": lambda module: lambda v, **o: module.sparse_vector(v, split="equal", **o),
    "paper": lambda module: module.figure_12,
}


def options(**changes: Any) -> dict[str, Any]:
    return {"bound": GAMMA, "threshold": TAU, "count": COUNT, "epsilon": EPSILON, **changes}


# ------------------------------------------------------------------- the same as the loops


@given(
    st.lists(st.floats(-3, 3), max_size=400),
    st.lists(st.floats(-3, 3), min_size=1, max_size=50),
    st.floats(0, 4),
)
def test_crossings_are_those_of_the_loop(noisy: list[float], limits: list[float], height: float) -> None:
    raised = [limit + height for limit in limits]  # high limits make crossings rare
    found = vectors._crossings(np.array(noisy, np.float64), np.array(raised))
    assert found.tolist() == reference.crossings(noisy, raised)


def test_far_crossings_are_found() -> None:
    noisy = np.zeros(100_000)
    where = [5, 6, 40, 90, 5_000, 99_999]
    noisy[where] = 1
    assert vectors._crossings(noisy, np.full(6, 0.5)).tolist() == where
    assert vectors._crossings(noisy, np.full(9, 0.5)).tolist() == where
    assert vectors._crossings(noisy, np.full(4, 0.5)).tolist() == where[:4]
    assert vectors._crossings(noisy[:4], np.full(4, 0.5)).tolist() == []


VALUES = np.array([0.0, 0.1, -0.5, 0.9, 0.3])  # one beyond γ
RUNS = 10_000


def compare(ours: Callable[[Any], dict[int, float]], theirs: Callable[[Any], dict[int, float]]) -> None:
    """Hold the distribution of what leaves against the loop's: which coordinates, then their values."""
    rng = np.random.default_rng(7)
    one, two = [ours(rng) for _ in range(RUNS)], [theirs(rng) for _ in range(RUNS)]
    sets = [Counter(tuple(sorted(found)) for found in runs) for runs in (one, two)]
    kinds = [kind for kind in sets[0].keys() | sets[1].keys() if sets[0][kind] + sets[1][kind] > 20]
    table = [[counts[kind] for kind in kinds] for counts in sets]
    assert chi2_contingency(table).pvalue > 1e-4
    for j in range(len(VALUES)):
        values = [[found[j] for found in runs if j in found] for runs in (one, two)]
        assert ks_2samp(*values).pvalue > 1e-4


def released(found: Any) -> dict[int, float]:
    return dict(zip(found.indices.tolist(), found.values.tolist(), strict=True))


@pytest.mark.statistical
@pytest.mark.parametrize("count", some([1, 2, 5], [2]))
@pytest.mark.parametrize("as_printed", [False, True])
def test_fig_12_releases_what_its_loop_releases(count: int, as_printed: bool) -> None:
    epsilon = 4.0 * count
    compare(
        lambda rng: released(
            vectors.figure_12(
                VALUES,
                noise=SimulationNoise(rng),
                as_printed=as_printed,
                **options(count=count, epsilon=epsilon),
            )
        ),
        lambda rng: reference.figure_12(
            VALUES.tolist(),
            gamma=GAMMA,
            tau=TAU,
            count=count,
            epsilon=epsilon,
            rng=rng,
            as_printed=as_printed,
        ),
    )


@pytest.mark.statistical
@pytest.mark.parametrize("count", some([1, 2, 5], [2]))
def test_above_threshold_finds_what_algorithm_1_finds(count: int) -> None:
    parts = {"eps_threshold": 1.0, "eps_search": 3.0 * count}
    rng = np.random.default_rng(3)
    common = {"bound": GAMMA, "threshold": TAU, "count": count}
    ours = Counter(
        tuple(vectors.above_threshold(VALUES, noise=SimulationNoise(rng), **common, **parts).tolist())
        for _ in range(RUNS)
    )
    theirs = Counter(
        tuple(reference.algorithm_1(VALUES.tolist(), gamma=GAMMA, tau=TAU, count=count, rng=rng, **parts))
        for _ in range(RUNS)
    )
    kinds = [kind for kind in ours.keys() | theirs.keys() if ours[kind] + theirs[kind] > 20]
    assert chi2_contingency([[counts[kind] for kind in kinds] for counts in (ours, theirs)]).pvalue > 1e-4


# -------------------------------------------------------------------------- the exact loss


def exact_loss(module: ModuleType, form: str) -> tuple[float, float]:
    """What finding and releasing cost, from the scales and the ranges that the mechanism really uses."""
    release = FORMS[form](module)
    return sparse_vector_losses(
        lambda values, noise: release(values, noise=noise, **options()),
        bound=GAMMA,
        count=COUNT,
        segments=form == "paper",
    )


def within_their_shares(losses: tuple[float, float]) -> bool:
    return losses[0] <= 8 / 9 * EPSILON * (1 + 1e-6) and losses[1] <= EPSILON / 9 * (1 + 1e-6)


@pytest.mark.parametrize(("form", "tight"), [("proved", 0.97), ("proved, equal split", 0.97), ("paper", 0.5)])
def test_the_exact_loss_is_within_epsilon_and_close_to_it(form: str, tight: float) -> None:
    losses = exact_loss(vectors, form)
    assert within_their_shares(losses)
    assert sum(losses) > tight * EPSILON


SEARCH, RELEASE = "2 * count * bound / eps_search", "scale=2 * bound * max(most, 1) / epsilon"
MUTANTS: dict[str, tuple[str, ModuleType, tuple[str, str]]] = {
    "search noise halved": ("proved", vectors, (SEARCH, "count * bound / eps_search")),
    "search without c": ("proved", vectors, (SEARCH, "2 * bound / eps_search")),
    "threshold noise halved": (
        "proved",
        vectors,
        ("scale=bound / eps_threshold", "scale=0.5 * bound / eps_threshold"),
    ),
    "release noise halved": ("proved", laplaces, (RELEASE, "scale=bound * max(most, 1) / epsilon")),
    "release without c": ("proved", laplaces, (RELEASE, "scale=2 * bound / epsilon")),
    "release not clipped before": ("proved", laplaces, ("np.clip(exact, -bound, bound)", "exact")),
    "ε spent twice": ("proved", vectors, ("finding = (1 - RELEASE_SHARE) * epsilon", "finding = epsilon")),
    "magnitudes not clipped": (
        "proved",
        vectors,
        ("np.minimum(found, limit, out=found)", "pass"),
    ),
    "fig 12, release without c": (
        "paper",
        vectors,
        ("2 * count * sensitivity / (2 / 9", "2 * sensitivity / (2 / 9"),
    ),
    "fig 12, finding without c": (
        "paper",
        vectors,
        ("2 * count * sensitivity / (8 / 9", "2 * sensitivity / (8 / 9"),
    ),
    "fig 12, not clipped before noise": (
        "paper",
        vectors,
        ("as_printed: bool = False", "as_printed: bool = True"),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_exact_loss_finds_weakened_mechanisms(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form, module, change = MUTANTS[name]
    weakened = mutant(module, change)
    if module is laplaces:
        monkeypatch.setattr(vectors, "laplace", weakened.laplace)
        weakened = vectors
    assert not within_their_shares(exact_loss(weakened, form))


def test_fig_12_finds_with_twice_the_noise_that_its_proof_needs() -> None:
    """It doubles the sensitivity of magnitudes: half of that noise keeps to its share, a quarter does not."""
    part = "2 * count * sensitivity / (8 / 9"
    for factor, kept in (("1", True), ("0.5", False)):
        weakened = mutant(vectors, (part, part.replace("2", factor, 1)))
        assert within_their_shares(exact_loss(weakened, "paper")) == kept


def test_no_bound_is_rounded_up() -> None:
    for bound in (0.001, 0.1, 0.3, 1e-4, 0.5):
        for dtype in (np.float32, np.float64):
            largest = float(vectors.magnitudes(np.array([9.0, -9.0], dtype), bound).max())
            assert bound * (1 - 1e-6) < largest <= bound
    careless = mutant(vectors, ("if float(limit) > bound:", "if False:"))
    assert float(careless.magnitudes(np.array([9.0], np.float32), 0.001).max()) > 0.001


def test_noise_does_not_depend_on_how_many_are_found() -> None:
    scales = []
    for fill in (GAMMA, 0.0):
        for release in (vectors.sparse_vector, vectors.figure_12):
            spy = Spy()
            release(np.full(9, fill), noise=spy, **options())
            scales.append([scale for _, scale in spy.calls])
    assert scales[0] == scales[2]
    assert scales[1] == scales[3]


# ------------------------------------------------------------------------- many transcripts

BIG = 1.0  # γ, where scales are easy to follow


def nothing_found(module: ModuleType, form: str) -> tuple[Callable[..., int], float]:
    """How many are found, and what finding nothing may cost: the threshold's share alone."""
    if form == "paper":
        common = {"bound": BIG, "threshold": 4.65, "count": 1, "epsilon": 6.0}

        def found(rng: Any, values: np.ndarray) -> int:
            return len(module.figure_12(values, noise=SimulationNoise(rng), **common).indices)

        return found, BIG / (4 * BIG / (8 / 9 * 6.0))

    def count(rng: Any, values: np.ndarray) -> int:
        return len(
            module.above_threshold(
                values,
                bound=BIG,
                threshold=5.4,
                count=1,
                eps_threshold=1.0,
                eps_search=1.0,
                noise=SimulationNoise(rng),
            )
        )

    return count, 1.0


REDRAWN = {
    "proved": (
        "[limit] = noise.laplace(np.array([threshold]), scale=bound / eps_threshold)",
        "limit = noise.laplace(np.full(queries.size, threshold), scale=bound / eps_threshold)",
    ),
    "paper": (
        "    able = np.flatnonzero(noisy >= limits.min())",
        "    fresh = noise.laplace(np.full(noisy.size, threshold), scale=threshold_scale)\n"
        "    return np.sort(noise.shuffled(np.flatnonzero(noisy >= fresh))[:count])",
    ),
}


@pytest.mark.statistical
@pytest.mark.parametrize("form", ["proved", "paper"])
def test_finding_nothing_costs_the_threshold_s_share_however_many_are_asked(form: str) -> None:
    """A threshold drawn anew for every query would pay for each of them; and that is caught."""
    one, other = np.zeros(100), np.full(100, BIG)
    found, allowed = nothing_found(vectors, form)
    assert empirical_loss(found, one, other, runs=12_000) <= allowed
    found, _ = nothing_found(mutant(vectors, REDRAWN[form]), form)
    assert empirical_loss(found, one, other, runs=12_000) > allowed


def signed(release: Callable[..., Any]) -> Callable[..., Any]:
    def transcript(rng: Any, values: np.ndarray) -> Any:
        found = release(values, noise=SimulationNoise(rng), **options(count=1, epsilon=1.0))
        return tuple(found.indices.tolist()), tuple((found.values > 0).tolist())

    return transcript


WORST = {
    "a value changes its sign": (np.array([40 * GAMMA]), np.array([-40 * GAMMA])),
    "one falls as others rise": (np.array([GAMMA, 0, 0, 0]), np.array([0, GAMMA, GAMMA, GAMMA])),
    "nothing, or far too much": (np.zeros(3), np.full(3, 1e6)),
}


@pytest.mark.statistical
@pytest.mark.parametrize("form", ["proved", "paper"])
@pytest.mark.parametrize("pair", WORST)
def test_no_pair_of_inputs_is_told_apart_by_more_than_epsilon(form: str, pair: str) -> None:
    assert empirical_loss(signed(FORMS[form](vectors)), *WORST[pair]) <= 1.0


@pytest.mark.statistical
def test_the_printed_order_is_refuted_by_its_transcripts() -> None:
    def printed(values: np.ndarray, **rest: Any) -> Any:
        return vectors.figure_12(values, as_printed=True, **rest)

    assert empirical_loss(signed(printed), *WORST["a value changes its sign"]) > 1.5  # of a stated 1


class TooLittle(SimulationNoise):
    def laplace(self, values: Any, *, scale: float) -> Any:
        return super().laplace(values, scale=scale / 8)


@pytest.mark.statistical
@pytest.mark.parametrize("form", ["proved", "paper"])
def test_too_little_noise_is_seen_in_transcripts(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SimulationNoise", TooLittle)
    assert any(empirical_loss(signed(FORMS[form](vectors)), *pair) > 1.0 for pair in WORST.values())


@pytest.mark.statistical
@pytest.mark.parametrize(("form", "larger"), [("paper", 0.52), ("proved", 0.58)])
def test_at_one_epsilon_per_parameter_selection_is_nearly_a_coin_flip(form: str, larger: float) -> None:
    """What docs/sparse-vector.md says about the paper's scale."""
    rng = np.random.default_rng(0)
    size, count, gamma = 140_106, 14_010, 1e-3
    change = np.where(rng.random(size) < 0.5, 0.0, gamma)
    common = {"bound": gamma, "threshold": 1e-4, "count": count, "epsilon": float(count)}
    found = FORMS[form](vectors)(change, noise=SimulationNoise(rng), **common)
    sample_clients = change[found.indices] > 0
    assert sample_clients.mean() == pytest.approx(larger, abs=0.02)
    assert (np.abs(found.values) >= gamma * (1 - 1e-9)).mean() == pytest.approx(0.95, abs=0.01)
    assert (found.values[sample_clients] < 0).mean() == pytest.approx(0.47, abs=0.02)


# -------------------------------------------------------------------------------- odd inputs


@pytest.mark.parametrize("release", [vectors.sparse_vector, vectors.figure_12])
def test_whatever_training_gave_something_bounded_leaves(release: Callable[..., Any]) -> None:
    noise = SimulationNoise(np.random.default_rng(0))
    for values in (np.full(8, np.nan), np.full(8, np.inf), np.array([np.nan, -np.inf, 1.0]), np.zeros(0)):
        found = release(values, noise=noise, **options(epsilon=1e4))
        assert found.indices.size <= COUNT
        assert np.isfinite(found.values).all()
        assert (np.abs(found.values) <= GAMMA).all()
    assert release(np.ones(8, np.float32), noise=noise, **options(epsilon=1e6)).values == pytest.approx(
        np.full(COUNT, GAMMA), abs=1e-3
    )


@pytest.mark.parametrize("wrong", [{"bound": 0.0}, {"epsilon": -1.0}, {"epsilon": np.nan}, {"count": 0}])
def test_impossible_parameters_are_refused_by_name(wrong: dict[str, float]) -> None:
    [name] = wrong
    for release in (vectors.sparse_vector, vectors.figure_12):
        with pytest.raises(PrivacyError, match=f"{name} = "):
            release(np.ones(4), noise=Spy(), **options(**wrong))
