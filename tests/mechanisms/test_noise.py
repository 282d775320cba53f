from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare, kstest, laplace, norm

from fed_dp.errors import PrivacyError
from fed_dp.mechanisms import Noise, SecureNoise, SimulationNoise
from fed_dp.mechanisms.noise import ExactSum

SOURCES: dict[str, Any] = {
    "simulation": lambda: SimulationNoise(np.random.default_rng(5)),
    "secure": SecureNoise,
}


@pytest.mark.statistical
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("scale", [1e-6, 0.7, 3e4])
def test_noise_has_the_distribution_it_is_named_after(source: str, scale: float) -> None:
    noise: Noise = SOURCES[source]()
    assert noise.name == source
    zeros = np.zeros(4000)
    assert kstest(noise.laplace(zeros, scale=scale), laplace(scale=scale).cdf).pvalue > 1e-4
    assert kstest(noise.gaussian(zeros, scale=scale), norm(scale=scale).cdf).pvalue > 1e-4
    with pytest.raises(AssertionError):  # half of it would be seen
        assert kstest(noise.laplace(zeros, scale=scale / 2), laplace(scale=scale).cdf).pvalue > 1e-4


@pytest.mark.parametrize("source", SOURCES)
def test_noise_is_added_to_the_values_and_leaves_them_alone(source: str) -> None:
    noise: Noise = SOURCES[source]()
    values = np.array([[1.0, -2.0], [300.0, 0.0]], np.float32)
    kept = values.copy()
    for add in (noise.laplace, noise.gaussian):
        noisy = add(values, scale=1e-3)
        assert noisy.shape == values.shape
        assert np.abs(noisy - values).max() < 0.05
        assert add(np.zeros(0), scale=1.0).size == 0
    assert np.array_equal(values, kept)


def test_simulation_noise_repeats_and_secure_noise_does_not() -> None:
    def draw(noise: Noise) -> bytes:
        return noise.laplace(np.zeros(20), scale=1.0).tobytes()

    assert draw(SOURCES["simulation"]()) == draw(SOURCES["simulation"]())
    assert draw(SecureNoise()) != draw(SecureNoise())
    items = np.arange(100)
    shuffled = [noise.shuffled(items).tolist() for noise in (SecureNoise(), SecureNoise())]
    assert shuffled[0] != shuffled[1]
    assert sorted(shuffled[0]) == items.tolist()


@pytest.mark.statistical
@pytest.mark.parametrize("source", SOURCES)
def test_every_order_is_as_likely(source: str) -> None:
    noise: Noise = SOURCES[source]()
    counts = Counter(tuple(noise.shuffled(np.arange(3)).tolist()) for _ in range(6000))
    assert len(counts) == 6
    assert chisquare(list(counts.values())).pvalue > 1e-4


def test_secure_noise_lies_on_one_grid_whatever_it_was_added_to() -> None:
    """The support tells nothing: 0 and 1/3 give multiples of the same power of two."""
    noise = SecureNoise()
    grid = 2.0**-40
    for value in (0.0, 1 / 3, -0.9999):
        noisy = noise.laplace(np.full(200, value), scale=1.0)
        assert np.array_equal(noisy / grid, np.round(noisy / grid))
    low_bits = SOURCES["simulation"]().laplace(np.full(200, 1 / 3), scale=1.0) / grid
    assert not np.array_equal(low_bits, np.round(low_bits))


def test_the_grid_makes_no_bound_larger() -> None:
    class Exact(SecureNoise):
        def _add(self, values: Any, scale: float, metric: Any, make: Any) -> Any:
            return super()._add(values, scale, metric, lambda *_, **__: lambda whole: whole)

    bound = 0.1  # no multiple of any power of two
    cut = Exact().laplace(np.array([bound, -bound, 0.0]), scale=0.3)
    assert 0.99999 * bound < cut[0] <= bound
    assert cut[1] == -cut[0]


def test_values_too_large_for_exact_noise_are_refused() -> None:
    with pytest.raises(PrivacyError, match="too small for values of this size"):
        SecureNoise().laplace(np.array([1e9]), scale=1e-6)


def test_secure_noise_without_the_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opendp.prelude", None)
    with pytest.raises(PrivacyError, match=r"pip install 'fed-dp\[secure\]'"):
        SecureNoise()


def test_an_exact_sum_neither_rounds_nor_wraps() -> None:
    rng = np.random.default_rng(0)
    terms = rng.integers(-(2**61), 2**61, (1000, 50))
    total = ExactSum(50)
    for term in terms:
        total.add(term)
    wanted = [max(-(2**61), min(2**61, sum(column))) for column in terms.T.tolist()]
    assert total.taken().tolist() == wanted
    assert total.taken().tolist() == [0] * 50  # it begins again
    for many in (2**61, -(2**61)):
        for _ in range(5):
            total.add(np.full(50, many))
        assert total.taken().tolist() == [many] * 50  # where int64 would have wrapped


def test_a_saturated_sum_moves_no_more_than_its_terms() -> None:
    """One term is replaced: no two sums are further apart than the two terms."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        terms = rng.integers(-(2**61), 2**61, (6, 3))
        sums = []
        for first in (terms[0], rng.integers(-(2**61), 2**61, 3)):
            total = ExactSum(3)
            for term in (first, *terms[1:]):
                total.add(term)
            sums.append((total.taken().tolist(), first.tolist()))
        for a, b, one, other in zip(sums[0][0], sums[1][0], sums[0][1], sums[1][1], strict=True):
            assert abs(a - b) <= abs(one - other)
