from __future__ import annotations

import json
import math
from collections.abc import Callable
from decimal import Decimal, getcontext
from fractions import Fraction

import numpy as np
import pytest
from dp_accounting.pld import common
from dp_accounting.pld import privacy_loss_distribution as pld
from opacus.accountants import PRVAccountant
from scipy.stats import norm

from fed_dp.accounting import (
    Event,
    Gaussian,
    Laplace,
    Release,
    SampledGaussian,
    SparseVector,
    Statement,
    Unprotected,
    epsilon,
    from_json,
    guarantees,
    noise_multiplier,
    pure_epsilon,
    pure_share,
    spent,
    to_json,
    total,
)
from fed_dp.accounting.statement import protects, standing, statement
from fed_dp.errors import PrivacyError
from fed_dp.mechanisms import gaussian_multiplier

DELTA = 1e-5


def event(client: int, turn: int, release: SampledGaussian) -> Event:
    return Event(release, "psgd", turn, client, "simulation")


def state(events: dict[int, list[Event]], sites: int = 1, smallest: int = 50) -> Statement | None:
    return statement(
        events,
        delta=DELTA,
        budget_epsilon=9.0,
        sites_per_record=sites,
        smallest_site=smallest,
    )


@pytest.mark.parametrize(("sigma", "rate", "steps"), [(1.0, 0.05, 400), (2.0, 0.5, 60), (0.8, 0.01, 1000)])
def test_epsilon_agrees_with_opacus_prv_within_two_percent(sigma: float, rate: float, steps: int) -> None:
    accountant = PRVAccountant()
    accountant.history = [(sigma, rate, steps)]
    theirs = accountant.get_epsilon(DELTA)
    assert epsilon([SampledGaussian(sigma, rate, steps)], delta=DELTA) == pytest.approx(theirs, rel=0.02)


def test_a_hundred_small_releases_sum_exactly_and_compose_to_less() -> None:
    releases = [Laplace(0.1)] * 100
    charges = [(release, "replace one") for release in releases]
    assert pure_epsilon(charges) == epsilon(releases, delta=0) == 10.0
    assert epsilon(releases, delta=DELTA) == pytest.approx(4.31, abs=0.01)
    assert epsilon([Laplace(1.0)] * 10, delta=DELTA) == pytest.approx(10, rel=1e-3)  # nothing to gain there
    assert pure_epsilon([*charges, (Gaussian(1.0), "replace one")]) is None
    assert epsilon([Gaussian(1.0)], delta=0) == math.inf


MIXED = [Laplace(0.2), SparseVector(0.3, 50), Gaussian(3.0), SampledGaussian(1.5, 0.05, 100)]


def test_a_mixture_of_mechanisms_composes_over_rounds() -> None:
    """Against dp-accounting's own objects; and between the dearest of its parts and their sum."""
    whole = [release for release in MIXED for _ in range(3)]
    theirs = pld.from_gaussian_mechanism(3.0, value_discretization_interval=1e-4).self_compose(3)
    sampled = pld.from_gaussian_mechanism(1.5, value_discretization_interval=1e-4, sampling_prob=0.05)
    theirs = theirs.compose(sampled.self_compose(300))
    for each in (0.2, 0.3):
        pure = pld.from_privacy_parameters(
            common.DifferentialPrivacyParameters(each), value_discretization_interval=1e-4
        )
        theirs = theirs.compose(pure.self_compose(3))
    found = epsilon(whole, delta=DELTA)
    assert found == pytest.approx(theirs.get_epsilon_for_delta(DELTA), rel=0.01)
    parts = [epsilon([release] * 3, delta=DELTA) for release in MIXED]
    assert max(parts) < found < sum(parts)


@pytest.mark.parametrize("extra", MIXED)
def test_no_release_is_free_in_a_mixture(extra: Release) -> None:
    assert epsilon([*MIXED, extra], delta=DELTA) > epsilon(MIXED, delta=DELTA)


def test_many_small_releases_have_no_cliff() -> None:
    few, more = (epsilon([Laplace(0.05)] * count, delta=DELTA) for count in (2000, 2001))
    assert few < more < 1.001 * few < 12
    each = pure_share(epsilon=20.0, delta=DELTA, releases=5000)
    assert 0.99 * 20 < epsilon([SparseVector(each, 1)] * 5000, delta=DELTA) <= 20


@pytest.mark.parametrize("delta", [1e-6, 1e-8, 1e-10])
def test_a_small_delta_is_not_lost_in_rounding_errors(delta: float) -> None:
    """5,000 × ε₀ = .001, whose true δ is a sum over a binomial, here in exact arithmetic."""
    count, each = 5000, Fraction(1, 1000)
    found = Fraction(epsilon([Laplace(float(each))] * count, delta=delta))
    getcontext().prec = 60
    up = Decimal(float(each)).exp() / (1 + Decimal(float(each)).exp())
    total = Decimal(0)
    for ups in range(count + 1):
        loss = (2 * ups - count) * each
        if loss > found:
            gap = Decimal(1) - (Decimal(float(found - loss))).exp()
            total += math.comb(count, ups) * up**ups * (1 - up) ** (count - ups) * gap
    assert 0.99 * delta < float(total) <= delta
    with pytest.raises(PrivacyError, match="delta = 1e-11: expected 0, or at least 1e-10"):
        epsilon([Laplace(0.1)], delta=1e-11)


def test_huge_pure_epsilons_are_added_not_forgotten() -> None:
    huge = [SparseVector(14_010.0, 14_010)] * 3
    assert epsilon(huge, delta=DELTA) == 42_030
    rest = epsilon([Gaussian(2.0)], delta=DELTA)
    assert epsilon([*huge, Gaussian(2.0)], delta=DELTA) == pytest.approx(42_030 + rest)


def test_gaussians_are_one_gaussian() -> None:
    assert epsilon([Gaussian(4.0)] * 16, delta=DELTA) == pytest.approx(epsilon([Gaussian(1.0)], delta=DELTA))


@pytest.mark.parametrize(("budget", "delta", "releases"), [(2.0, 1e-5, 200), (8.0, 1e-5, 20), (1.0, 0.0, 7)])
def test_shares_of_a_budget_spend_it_and_never_more(budget: float, delta: float, releases: int) -> None:
    each = pure_share(epsilon=budget, delta=delta, releases=releases)
    spent = epsilon([SparseVector(each, 3)] * releases, delta=delta)
    assert 0.99 * budget < spent <= budget * (1 + 1e-9)
    assert each >= budget / releases
    if releases == 200:
        assert each > 3 * budget / releases  # what δ buys


def test_rounds_compose_to_the_whole_and_no_release_is_free() -> None:
    rounds = [SampledGaussian(1.5, 0.1, 10)] * 7
    whole = epsilon([SampledGaussian(1.5, 0.1, 70)], delta=DELTA)
    assert epsilon(rounds, delta=DELTA) == whole
    assert epsilon(rounds[:1], delta=DELTA) < whole < 7 * epsilon(rounds[:1], delta=DELTA)
    mixed = epsilon([*rounds, SampledGaussian(4.0, 0.2, 5)], delta=DELTA)
    assert mixed > whole
    assert epsilon([], delta=DELTA) == 0


@pytest.mark.parametrize(("budget", "rate", "steps"), [(0.5, 0.1, 100), (2.0, 0.05, 300), (8.0, 0.5, 80)])
def test_calibration_spends_the_budget_and_never_more(budget: float, rate: float, steps: int) -> None:
    sigma = noise_multiplier(epsilon=budget, delta=DELTA, sample_rate=rate, steps=steps)
    spent = epsilon([SampledGaussian(sigma, rate, steps)], delta=DELTA)
    assert 0.99 * budget < spent <= budget
    assert epsilon([SampledGaussian(0.98 * sigma, rate, steps)], delta=DELTA) > budget


def test_a_generous_budget_still_gets_noise() -> None:
    assert noise_multiplier(epsilon=1e6, delta=DELTA, sample_rate=0.1, steps=1) == 0.25


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((0.0, 0.1, 1), "noise_multiplier = 0.0"),
        ((float("nan"), 0.1, 1), "noise_multiplier = nan"),
        ((1.0, 0.0, 1), "sample_rate = 0.0"),
        ((1.0, 1.5, 1), "sample_rate = 1.5"),
        ((1.0, 0.1, -1), "steps = -1"),
        ((1.0, 0.1, 1.5), "steps = 1.5"),
        ((1e300, 0.1, 1), "noise_multiplier = 1e"),
        ((1.0, 0.1, 10**12), "steps = 10000"),
    ],
)
def test_an_impossible_release_cannot_be_described(arguments: tuple[float, float, int], says: str) -> None:
    with pytest.raises(PrivacyError, match=says):
        SampledGaussian(*arguments)


def test_events_survive_the_wire_and_malformed_ones_are_refused() -> None:
    events = (event(3, 1, SampledGaussian(1.0, 0.1, 10)),)
    assert from_json(to_json(events)) == events
    good = json.loads(to_json(events))[0]
    altered = [
        {"guarantee": "perfect"},
        {"noise_source": "nobody"},
        {"release": {"mechanism": "magic"}},
        {"release": {"mechanism": "laplace", "epsilon": -1.0}},
        {"client": [0]},
        {"client": True},
        {"round": -1},
        {"round": 1.5},
        {"extra": 1},
    ]
    as_text = [json.dumps([{**good, **change}]) for change in altered]
    for wrong in (*as_text, "", "{", "[1]", '[{"release": {}}]', '[{"unit": "record"}]', "[" * 100_000):
        with pytest.raises(PrivacyError, match=r"malformed|epsilon = -1.0|expected a whole"):
            from_json(wrong)


def test_disjoint_sites_cost_the_largest_and_shared_records_pay_at_each() -> None:
    cheap, dear = SampledGaussian(3.0, 0.1, 50), SampledGaussian(1.5, 0.1, 50)
    events = {0: [event(0, 1, cheap)], 1: [event(1, 1, dear), event(1, 2, dear)], 2: [event(2, 1, cheap)]}

    def total(sites: int) -> float:
        found = state(events, sites)
        assert found is not None
        return found.epsilon_total

    assert total(1) == epsilon([dear, dear], delta=DELTA)
    assert total(2) == epsilon([dear, dear, cheap], delta=DELTA)
    assert total(3) == epsilon([dear, dear, cheap, cheap], delta=DELTA) > total(2) > total(1)


def test_a_statement_tells_the_total_first_and_the_worst_standing() -> None:
    release = SampledGaussian(2.0, 0.1, 20)
    refuted = Event(SparseVector(0.5, 7), "sparse_vector_as_printed", 2, 0, "secure")
    found = state({0: [event(0, 1, release), refuted]})
    assert found is not None
    assert found.guarantee == "refuted"
    assert (found.unit, found.neighbours) == ("record", "zero-out one")  # the weakest of the two
    assert found.noise_source == "secure and simulation"
    assert found.epsilon_per_parameter == 0.5 / 7
    assert found.epsilon_pure is None
    lines = found.lines()
    assert lines[0].startswith(f"privacy: total ε = {found.epsilon_total:.3f}")
    assert "no ε holds" in found.warnings[0]
    plain = state({0: [event(0, 1, release)]})
    assert plain is not None
    assert "not secure" in "".join(plain.lines())
    assert plain.warnings == ()
    assert state({}) is None


def test_participants_and_records_are_told_apart_where_sites_overlap() -> None:
    release = SparseVector(1.0, 100)
    events = {k: [Event(release, "sparse_vector", 1, k, "secure")] for k in range(5)}
    found = statement(events, delta=0.0, budget_epsilon=9.0, sites_per_record=3, smallest_site=50, refused=2)
    assert found is not None
    assert (found.epsilon_total, found.epsilon_pure, found.epsilon_per_round) == (3.0, 3.0, 1.0)
    assert found.epsilon_per_parameter == 0.01
    assert (found.unit, found.neighbours, found.guarantee) == ("participant", "replace one", "proved")
    assert "pays at each (the records of one site alone, all together, cost ε = 1.000)" in found.scope
    lines = found.lines()
    text = "\n".join(lines)
    assert text.index("total ε = 3.000") < text.index("one round alone: ε = 1.000") < text.index("ε/c = 0.01")
    assert "noise: secure" in text
    assert "2 client-rounds went on without a site" in lines[-1]


def test_every_guarantee_is_complete() -> None:
    for name, guarantee in guarantees().items():
        assert guarantee.name == name
        assert guarantee.reason
        assert guarantee.assumptions
    assert {g.status for g in guarantees().values()} == {"proved", "claimed", "refuted", "none"}
    assert guarantees()["sparse_vector_as_printed"].status == "refuted"


def test_a_delta_that_protects_nobody_is_warned_of() -> None:
    events = {0: [event(0, 1, SampledGaussian(2.0, 0.1, 20))]}
    found = state(events, smallest=200_000)
    assert found is not None
    assert "not below 1/200000" in found.lines()[-1]


def charged(release: Release, guarantee: str) -> Event:
    return Event(release, guarantee, 1, 0, "secure")


def test_charges_for_different_neighbours_are_composed_for_the_strongest() -> None:
    """A budget of ε = 4 for neighbours that zero out a record is 9.085 for those that replace it, not 8."""
    gaussian = charged(Gaussian(gaussian_multiplier(epsilon=4.0, delta=DELTA)), "statistics")
    other = charged(Laplace(1e-9), "svm")
    assert spent([gaussian], delta=DELTA) == pytest.approx(4.0)
    assert spent([gaussian, other], delta=DELTA) == pytest.approx(9.0847, abs=1e-3)
    assert protects([gaussian, gaussian]) == "zero-out one record"
    assert protects([gaussian, other]) == (
        "replace one record (charges for zero-out one are composed with twice the sensitivity)"
    )
    found = state({0: [gaussian, other]})
    assert found is not None
    assert found.neighbours == "replace one"
    assert found.epsilon_total == spent([gaussian, other], delta=DELTA)


@pytest.mark.parametrize(
    ("release", "doubled"),
    [
        (Laplace(0.3), lambda: 0.6),
        (SparseVector(0.3, 9), lambda: 0.6),
        (SampledGaussian(2.0, 1.0, 1), lambda: epsilon([Gaussian(1.0)], delta=DELTA)),
        (SampledGaussian(1.5, 0.1, 100), lambda: sampled_replaced(1.5, 0.1, 100)),
        (SampledGaussian(0.8, 0.01, 100), lambda: sampled_replaced(0.8, 0.01, 100)),
    ],
)
def test_what_a_replaced_record_loses_is_that_of_the_worst_pair(
    release: Release, doubled: Callable[[], float]
) -> None:
    found = total([(release, "zero-out one"), (Laplace(1e-9), "replace one")], delta=DELTA)
    assert found == pytest.approx(doubled(), rel=4e-3)


def sampled_replaced(sigma: float, rate: float, steps: int) -> float:
    """A gradient of norm 1 and its opposite, each in a sample with the same chance: by two mass functions."""
    edges = np.concatenate([[-np.inf], np.arange(-9 * sigma - 1, 9 * sigma + 1, 2e-3), [np.inf]])
    mass = np.diff(norm.cdf(edges[:, None], loc=[0, 1, -1], scale=sigma), axis=0)
    mass = mass[(mass > 1e-290).all(1)]
    up, down = ((1 - rate) * mass[:, 0] + rate * mass[:, k] for k in (1, 2))
    logs = [dict(enumerate(np.log(each / each.sum()).tolist())) for each in (down, up)]
    pair = pld.from_two_probability_mass_functions(logs[0], logs[1], value_discretization_interval=1e-4)
    return float(pair.self_compose(steps).get_epsilon_for_delta(DELTA))


def test_a_participants_charge_holds_for_any_change_and_is_not_doubled() -> None:
    participant, record = charged(SparseVector(1.0, 5), "sparse_vector"), charged(Laplace(1.0), "statistics")
    assert spent([participant, record], delta=0) == 2.0
    assert protects([participant, record]) == "zero-out one record (some charges: replace one participant)"
    assert spent([participant, charged(Laplace(1.0), "svm")], delta=0) == 2.0
    assert spent([participant, record, charged(Laplace(1.0), "svm")], delta=0) == 4.0


def test_adding_and_zeroing_out_do_not_double_each_other() -> None:
    charges = [charged(Laplace(1.0), name) for name in ("statistics", "statistics_add_remove")]
    assert spent(charges, delta=0) == 2.0
    assert protects(charges) == "zero-out one record"  # of the two, what both promise
    assert protects(charges[1:]) == "add/remove one record"


def test_a_delta_for_participants_is_compared_with_their_number() -> None:
    for release, guarantee, says in (
        (Gaussian(2.0), "random_mask", "δ = 0.01 is not below 1/150, one over the number of sites"),
        (Gaussian(2.0), "statistics", ""),
    ):
        events = {k: [Event(release, guarantee, 1, k, "secure")] for k in range(150)}
        found = statement(events, delta=0.01, budget_epsilon=9.0, sites_per_record=1, smallest_site=60)
        assert found is not None
        assert [says in warning for warning in found.warnings] == ([True] if says else [])


def test_standing_names_the_weakest_and_what_had_no_noise() -> None:
    record, claimed = charged(Laplace(1.0), "statistics"), charged(Laplace(1.0), "dpa_paper")
    assert standing([record]) == "proved; neighbours: zero-out one record"
    assert standing([record, claimed]).startswith("claimed; ")
    bare = Event(Unprotected("upload"), "none", 1, 0, "none")
    score = Event(Unprotected("scores"), "none", 1, 0, "none")
    assert standing([bare, score, bare]) == (
        "without noise: 2 uploads, so that no ε bounds what was released; without noise: scores on the test "
        "records, 1 times"
    )
    assert standing([record, score]).startswith("proved; neighbours: zero-out one record; without noise")


def test_a_release_without_noise_is_no_event_of_a_private_one() -> None:
    good = json.loads(to_json([Event(Unprotected("upload"), "none", 1, 0, "none")]))[0]
    assert from_json(json.dumps([good]))
    other = {"mechanism": "none", "of": "x"}
    for change in ({"guarantee": "psgd"}, {"noise_source": "secure"}, {"release": other}):
        with pytest.raises(PrivacyError):
            from_json(json.dumps([{**good, **change}]))
    with pytest.raises(PrivacyError):
        from_json(to_json([charged(Laplace(1.0), "none")]))
