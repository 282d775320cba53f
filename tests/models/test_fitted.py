"""Layers that are fitted to public records: frequencies of a kernel, relevance of inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import approx_fprime

from fed_dp.errors import PrivacyError
from fed_dp.mechanisms import SimulationNoise
from fed_dp.mechanisms.statistics import ClassSums, NoiseSpec, deviation, release
from fed_dp.models import fitted, initial_weights, use_one_thread
from fed_dp.models.fitted import ClassMeans, FourierFeatures, Relevant, fitted_frequencies
from fed_dp.models.kernel import KernelMachine
from tests.networks import network

RNG = np.random.default_rng


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    use_one_thread()


def kernel_error(records: np.ndarray, frequencies: np.ndarray, width: float) -> float:
    """Eq. 6 with squares, one pair and one frequency at a time."""
    total = 0.0
    for a in records:
        for b in records:
            wanted = np.exp(-((a - b) ** 2).sum() / width**2)
            total += (np.mean([np.cos(rho @ (a - b)) for rho in frequencies.T]) - wanted) ** 2
    return total


def test_frequencies_fit_the_kernel_on_the_public_records(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = RNG(0)
    records, start = rng.normal(size=(9, 3)), rng.normal(size=(3, 6))
    seen = []

    def check(objective, flat, jac, method, options):  # type: ignore[no-untyped-def]
        value, slope = objective(flat)
        seen.append((value, slope, approx_fprime(flat, lambda f: objective(f)[0], 1e-6)))
        return real(objective, flat, jac=jac, method=method, options=options)

    real = fitted.minimize
    monkeypatch.setattr(fitted, "minimize", check)
    found = fitted_frequencies(records, start, 1.5)
    [(value, slope, numeric)] = seen
    assert value == pytest.approx(kernel_error(records, start, 1.5))
    assert slope == pytest.approx(numeric, rel=1e-3, abs=1e-4)
    assert kernel_error(records, found, 1.5) < 0.05 * kernel_error(records, start, 1.5)


def test_fourier_features_are_the_kernel_and_have_norm_one() -> None:
    torch.manual_seed(0)
    layer = FourierFeatures(4, 20_000, 2.0)
    x = RNG(0).normal(size=(12, 4)).astype(np.float32)
    z = layer(torch.from_numpy(x)).numpy()
    kernel = np.exp(-((x[:, None] - x[None]) ** 2).sum(2) / 4.0)
    assert z @ z.T == pytest.approx(kernel, abs=0.05)
    assert np.linalg.norm(z, axis=1) == pytest.approx(np.ones(12), abs=1e-4)


def test_public_records_change_the_frequencies_and_the_seed_draws_them() -> None:
    x = RNG(0).normal(size=(10, 5)).astype(np.float32)
    y = np.zeros(10, np.int64)
    plain, again, other = (initial_weights(network("rbf", (5,), 2), seed=s) for s in (1, 1, 2))
    hybrid = initial_weights(network("rbf", (5,), 2), seed=1, public=(x, y))
    assert plain.tobytes() == again.tobytes() != other.tobytes()
    assert hybrid.tobytes() != plain.tobytes()
    assert hybrid.tobytes() == initial_weights(network("rbf", (5,), 2), seed=1, public=(x, y)).tobytes()


def test_two_classes_have_one_output_and_its_sign_decides() -> None:
    machine = network("rbf", (5,), 2, features=8).build()
    assert isinstance(machine, KernelMachine)
    assert machine.head.out_features == 1
    torch.nn.init.normal_(machine.head.weight)
    x = torch.from_numpy(RNG(0).normal(size=(30, 5)).astype(np.float32))
    with torch.no_grad():
        output, score = machine(x), machine.head(machine.features(x))[:, 0]
    assert torch.equal(output.argmax(1), (score > 0).long())
    assert output.exp().sum(1).numpy() == pytest.approx(np.ones(30), abs=1e-5)


def labelled(
    count: int, *, inputs: int = 60, relevant: int = 6, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Records in which a few inputs tell the class, and the rest are noise."""
    rng = RNG(seed)
    y = rng.integers(3, size=count)
    means = RNG(99).choice([-0.6, 0.0, 0.6], size=(3, relevant))
    x = rng.uniform(-1, 1, size=(count, inputs)) * 0.9
    x[:, :relevant] = means[y] + rng.normal(size=(count, relevant)) * 0.3
    return x.astype(np.float32), y.astype(np.int64)


def test_relevance_is_found_where_it_is() -> None:
    torch.manual_seed(0)
    layer = Relevant(60, adaptive=True)
    x, y = labelled(1500)
    with torch.no_grad():
        layer.fit(torch.from_numpy(x), torch.from_numpy(y))
    shares = layer.shares.numpy()
    assert shares.mean() == pytest.approx(1, abs=1e-5)
    assert shares[:6].mean() > 2 * shares[6:].mean()


@pytest.mark.parametrize("sent", [np.nan, -5.0, 0.0, np.inf, 1e30])
def test_whatever_relevance_a_server_sends_the_shares_add_up(sent: float) -> None:
    network = ClassMeans(6, 3, adaptive=True)
    layer = network.layers[0]
    assert isinstance(layer, Relevant)
    layer.relevance.data[2] = sent
    statistic = network.head_statistics(1.0)
    assert (statistic.shares > 0).all()
    assert statistic.shares.sum() == pytest.approx(1)
    with pytest.raises(PrivacyError, match="add up to"):
        ClassSums(statistic.shares * 2, statistic.prior, 3)


def test_every_share_of_the_budget_is_the_noise_of_its_feature() -> None:
    shares = np.array([0.5, 0.3, 0.15, 0.05])
    statistic = ClassSums(shares, np.ones(3), 2)
    rng = SimulationNoise(RNG(0))
    drawn = np.stack([release(statistic, [], NoiseSpec("laplace", 2.0), rng) for _ in range(3000)])
    wanted = np.repeat(np.sqrt(2) / (2.0 * shares), 2)  # Lap(1/ε_j), ε_j = share · ε
    assert drawn.std(0) == pytest.approx(wanted, rel=0.1)
    drawn = np.stack([release(statistic, [], NoiseSpec("gaussian", 3.0), rng) for _ in range(3000)])
    assert drawn.std(0) == pytest.approx(np.repeat(3.0 / np.sqrt(shares), 2), rel=0.1)


def accuracy(adaptive: bool, *, epsilon: float, seed: int) -> float:
    torch.manual_seed(seed)
    network = ClassMeans(60, 3, adaptive=adaptive)
    public, labels = labelled(1500, seed=1)
    network.fit(torch.from_numpy(public), torch.from_numpy(labels))
    x, y = labelled(2000, seed=2)
    statistic, noise_spec = network.head_statistics(1.0), NoiseSpec("laplace", epsilon)
    with torch.no_grad():
        features = network.features(torch.from_numpy(x)).numpy()
    total = release(statistic, [(features, y)], noise_spec, SimulationNoise(RNG(seed)))
    noise = deviation(statistic, noise_spec) / len(y)
    head = statistic.head(total / len(y), noise=noise, kind="laplace", ridge=0.5)
    test, truth = labelled(2000, seed=3)
    with torch.no_grad():
        seen = network.features(torch.from_numpy(test)).numpy()
    return float(((seen @ head).argmax(1) == truth).mean())


def test_noise_by_relevance_beats_identical_noise_where_inputs_differ() -> None:
    adaptive, identical = (
        np.mean([accuracy(each, epsilon=0.5, seed=seed) for seed in range(5)]) for each in (True, False)
    )
    assert adaptive > identical + 0.05
    assert accuracy(True, epsilon=1e6, seed=0) > identical
