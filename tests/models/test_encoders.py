"""Encoders: the scattering transform against its definition, learnt layers, the papers' networks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fed_dp import plugins
from fed_dp.errors import ModelError
from fed_dp.experiment import build as experiment_of
from fed_dp.mechanisms.functional import approximation
from fed_dp.mechanisms.statistics import release
from fed_dp.models import Encoded, FlatNetwork, Solver
from fed_dp.models.encoders import Compression, Fitted, PatchFilters, RandomFeatures, Scattered
from fed_dp.models.layers import OnFrozen
from fed_dp.models.paper import AutoEncoder, Cdbn, Crbm
from fed_dp.models.scattering import ANGLES, CHANNELS, MARGIN, Scattering, _low_pass, _morlet
from tests.networks import network, options_of

IMAGES, BEHAVIOUR = (1, 8, 8), (1, 5, 30)


def images(count: int = 6, shape: tuple[int, ...] = IMAGES) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).normal(size=(count, *shape)).astype(np.float32))


def test_scattering_is_its_definition() -> None:
    """Direct circular convolutions in double precision, one path at a time."""
    height, width = 12, 8
    x = np.random.default_rng(0).normal(size=(height, width))
    padded = np.pad(x, MARGIN, mode="reflect")
    rows, columns = padded.shape
    ours = Scattering(height, width)(torch.from_numpy(x[None, None].astype(np.float32)))[0].numpy()
    assert ours.shape == (CHANNELS, height // 4, width // 4)

    def convolve(image: np.ndarray, octave: int, k: int) -> np.ndarray:
        kernel = np.fft.ifft2(_morlet(rows, columns, octave, k * math.pi / ANGLES))
        out = np.zeros_like(image, complex)
        for i in range(rows):
            for j in range(columns):
                out += kernel[i, j] * np.roll(image, (i, j), (0, 1))
        return np.abs(out)

    def smooth(image: np.ndarray, step: int) -> np.ndarray:
        picked = image[::step, ::step]
        octave = int(math.log2(step))
        return (
            _low_pass(rows // step, height // 4, octave)
            @ picked
            @ _low_pass(columns // step, width // 4, octave).T
        )

    assert ours[0] == pytest.approx(smooth(padded, 1), abs=1e-5)
    for first in (0, 5):
        fine = convolve(padded, 0, first)
        assert ours[1 + first] == pytest.approx(smooth(fine, 1), abs=1e-5)
        assert ours[9 + first] == pytest.approx(smooth(convolve(padded, 1, first), 2), abs=1e-5)
        for second in (0, 3):
            path = smooth(convolve(fine, 1, second), 2)
            assert ours[17 + 8 * first + second] == pytest.approx(path, abs=1e-5)


def test_wavelets_do_not_see_a_constant_and_scattering_hardly_sees_a_shift() -> None:
    transform = Scattering(16, 16)
    flat = transform(torch.full((1, 1, 16, 16), 3.0))[0]
    assert float(flat[0].sub(3).abs().max()) < 1e-4
    assert float(flat[1:].abs().max()) < 1e-3
    image = torch.zeros(1, 1, 16, 16)
    image[0, 0, 5:11, 6:9] = 1
    moved = torch.roll(image, 1, 3)
    apart = (transform(image) - transform(moved)).norm() / transform(image).norm()
    assert apart < 0.5 * (image - moved).norm() / image.norm()


def test_odd_and_small_images_are_transformed() -> None:
    assert Scattering(9, 11)(torch.ones(2, 3, 9, 11)).shape == (2, 3 * CHANNELS, 2, 2)


PROVED = {"encoder": "dpa", "filters": "pcdbn", "relevance": "adlm"}  # who trains what an encoder offers
MODELS = plugins.components("model")
STATISTICS_MODELS = [name for name, model in MODELS.items() if model.offers in PROVED]


@pytest.mark.parametrize("name", STATISTICS_MODELS)
def test_features_have_norm_one_and_the_layout_is_that_of_the_statistics(name: str, tmp_path: Path) -> None:
    shape = BEHAVIOUR if MODELS[name].of_behaviour else IMAGES
    given = network(name, shape, 10, **options_of(name, tmp_path, channels=shape[0]))
    encoded = given.build()
    assert isinstance(encoded, Encoded)
    with torch.no_grad():
        features = encoded.features(images(6, shape))
    if name == "class-sums":  # every one of its features is bounded
        assert float(features.abs().max()) == 1
    else:
        assert features.norm(dim=1).numpy() == pytest.approx(np.ones(6), abs=1e-4)
    solver = Solver(given, cross=1.0)
    sizes = [layer.statistic.size for layer in encoded.learnt]
    assert [statistic.size for statistic in solver.statistics[:-1]] == sizes
    fitted = sum(
        parameter.numel()
        for layer in encoded.layers
        if isinstance(layer, Fitted)
        for parameter in layer.parameters()
    )
    assert FlatNetwork(given).size == sum(sizes) + fitted + 10 * features.shape[1]


@pytest.mark.parametrize(
    ("name", "layers"),
    [(name, None) for name in STATISTICS_MODELS]
    + [(name, 2) for name in STATISTICS_MODELS if "layers" in MODELS[name].model_fields],
)
def test_the_schema_counts_the_stages_of_every_network(name: str, layers: int | None, tmp_path: Path) -> None:
    trainer = PROVED[MODELS[name].offers]
    shape = BEHAVIOUR if MODELS[name].of_behaviour else IMAGES
    model = {"name": name, **options_of(name, tmp_path, channels=shape[0])}
    model |= {"layers": layers} if layers else {}
    data: dict[str, Any] = {"name": "health-weekly" if MODELS[name].of_behaviour else "digits"}
    data |= {"public_records": 50} if trainer == "adlm" else {}
    experiment = experiment_of({"data": data, "model": model, "trainer": {"name": trainer, "perturb": False}})
    encoded = experiment.network(shape, 10).build()
    assert isinstance(encoded, Encoded)
    assert encoded.stages == len(encoded.learnt) + 1 == experiment.model.stages


def test_an_encoder_without_records_is_the_same_everywhere() -> None:
    one, two = Scattered(IMAGES), Scattered(IMAGES)
    assert torch.equal(one.mean, two.mean)
    assert torch.equal(one.scale, two.scale)
    assert torch.equal(RandomFeatures(5, 8, 1.0).directions, RandomFeatures(5, 8, 1.0).directions)


def test_random_features_are_the_gaussian_kernel() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 6)).astype(np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    f = RandomFeatures(6, 20_000, 1.5)(torch.from_numpy(x)).numpy()
    kernel = np.exp(-(1.5**2) * ((x[:, None] - x[None]) ** 2).sum(2) / 2)
    assert f @ f.T == pytest.approx(kernel, abs=0.05)


def test_compression_is_principal_component_analysis_where_there_is_one_channel() -> None:
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(500, 1, 6)) * np.array([5, 3, 2, 1, 0.5, 0.2])).astype(np.float32)
    layer = Compression(1, 6, 2, 0.0)
    with torch.no_grad():
        seen = layer.seen(torch.from_numpy(x)).numpy()
        total = release(layer.statistic, [(seen, np.zeros(500, int))], None, None)
        layer.moments.copy_(torch.from_numpy((total / 500).astype(np.float32)))
        found = layer(torch.from_numpy(x)).numpy()
    centred = seen - seen.mean(0)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    for k in range(2):
        ours, theirs = found[:, k], centred @ directions[k]
        assert abs(np.corrcoef(ours, theirs)[0, 1]) == pytest.approx(1, abs=1e-4)


def test_whitening_makes_components_alike() -> None:
    rng = np.random.default_rng(0)
    x = torch.from_numpy((rng.normal(size=(400, 2, 5)) * np.linspace(1, 4, 5)).astype(np.float32))
    spreads = []
    for whitening in (0.0, 0.5, 1.0):
        layer = Compression(2, 5, 6, whitening)
        with torch.no_grad():
            total = release(layer.statistic, [(layer.seen(x).numpy(), np.zeros(400, int))], None, None)
            layer.moments.copy_(torch.from_numpy((total / 400).astype(np.float32)))
            deviations = layer(x).std(0)
        spreads.append(float(deviations.max() / deviations.min()))
    assert spreads[0] > spreads[1] > spreads[2]
    assert spreads[2] < 1.5


def test_patch_filters_find_what_patches_are_made_of() -> None:
    stripes = torch.zeros(40, 1, 12, 12)
    for k in range(40):
        stripes[k, 0] = torch.sin(torch.arange(12.0) * 1.2 + k)[None].expand(12, 12) * 3
    layer = PatchFilters(1, 5, 2, 4)
    with torch.no_grad():
        seen = layer.seen(stripes)
        assert float(seen.norm(dim=2).max()) <= 1 + 1e-5
        total = release(layer.statistic, [(seen.numpy(), np.zeros(40, int))], None, None)
        layer.moments.copy_(torch.from_numpy((total / 40).astype(np.float32)))
        bank = layer.made()[0].numpy()
        out = layer(stripes)
    assert out.shape == (40, 4, 3, 3)
    assert float(out.max()) <= 1
    assert np.abs(bank - bank.mean(2, keepdims=True)).max() < 0.02  # filters vary as stripes do
    assert np.abs(bank.sum((1, 2, 3))).max() < 1e-5


def test_layers_that_are_too_large_for_the_data_are_refused() -> None:
    with pytest.raises(ModelError, match=r"model.components = 500: the maps have only 64 dimensions"):
        network("private-pca", IMAGES, 10, components=500).build()
    with pytest.raises(ModelError, match=r"model.filters = 25: patches have 25 numbers"):
        network("patch-filters", IMAGES, 10, filters=25).build()
    with pytest.raises(ModelError, match=r"model.features = 7: random features come in pairs"):
        network("random-features", IMAGES, 10, features=7).build()
    with pytest.raises(ModelError, match=r"needs images of 8×8"):
        network("scattering", (30,), 2).build()


def test_a_network_on_frozen_layers_is_trained_on_their_features() -> None:
    net = FlatNetwork(network("scattering-linear", IMAGES, 10))
    assert isinstance(net.network, OnFrozen)
    x = images()
    with torch.no_grad():
        assert torch.allclose(net.trained(net.inputs(x.numpy())), net.network(x), atol=1e-6)
    assert net.size == 10 * (CHANNELS * 4) + 10


# ------------------------------------------------------------------------- the papers' networks


def test_the_auto_encoder_is_tied_and_normalised() -> None:
    network = AutoEncoder(IMAGES, 10, 20, 2, behaviour=False)
    x = images()
    inputs, beside = network.given(x)
    assert float(inputs.min()) >= 0
    assert float(inputs.max()) <= 1
    h = network.hidden(0, inputs, beside)
    assert torch.allclose(h, torch.sigmoid(inputs @ network.tied[0]))
    assert float(network.normalised(0, h).detach().norm(dim=1).max()) <= 1
    assert network(x).exp().sum(1).detach().numpy() == pytest.approx(np.ones(6), abs=1e-5)
    assert sum(p.numel() for p in network.parameters()) == 64 * 20 + 20 * 20 + 4 * 20 + 20 * 10


def test_behaviour_sees_now_the_past_and_friends() -> None:
    dpah = network("dpah", BEHAVIOUR, 2, hidden=12).build()
    assert isinstance(dpah, AutoEncoder)
    assert dpah.tied[0].shape == (30, 12)
    assert dpah.past.shape == (90, 12)
    x = images(4, BEHAVIOUR)
    inputs, _ = dpah.given(x)
    assert torch.allclose(inputs, ((x[:, 0, 3] + 1) / 2).clamp(0, 1))
    with torch.no_grad():
        before = dpah(x)
        dpah.influence.fill_(2.0)
        dpah.head.normal_()
        base = dpah(x)
        friends = x.clone()
        friends[:, 0, 4, 0] += 0.5
        assert not torch.allclose(dpah(friends), base)
        other = x.clone()
        other[:, 0, 4, 1:] = 9  # nothing is there
        assert torch.allclose(dpah(other), base)
        assert torch.allclose(before, torch.full_like(before, math.log(0.5)))
    with pytest.raises(ModelError, match="a model of behaviour needs records of shape"):
        network("dpah", (64,), 2).build()


def test_each_person_may_be_swayed_in_a_measure_of_their_own() -> None:
    one = network("dpah", BEHAVIOUR, 2, hidden=12).build()
    own = network("dpah", BEHAVIOUR, 2, hidden=12, users=3).build()
    assert isinstance(one, AutoEncoder)
    assert isinstance(own, AutoEncoder)
    assert own.influence.shape == (3,)
    x = images(6, BEHAVIOUR)
    x[:, 0, 4, 1] = torch.tensor([1.0, 3.0, 0.0, 4.0, -7.0, 1e30])  # the first, the last, and nobody
    with torch.no_grad():
        for theirs, ours in zip(one.parameters(), own.parameters(), strict=True):
            ours.copy_(theirs if theirs.shape == ours.shape else torch.tensor([2.0, 5.0, -1.0]))
        _, beside = own.given(x)
        for record, eta in zip(range(6), (2.0, -1.0, 0, 0, 0, 0), strict=True):
            one.influence.fill_(eta)
            _, alone = one.given(x[record : record + 1])
            assert isinstance(beside, torch.Tensor)
            assert isinstance(alone, torch.Tensor)
            assert torch.allclose(beside[record], alone[0], atol=1e-5)
    gradient = torch.autograd.grad(own.given(x)[1].sum(), own.influence)[0]  # type: ignore[union-attr]
    assert gradient[1] == 0  # nobody's record is the second person's
    assert (gradient[[0, 2]] != 0).all()
    with pytest.raises(ModelError, match=r"model\.users = 3: .* needs two attributes or more"):
        network("dpah", (1, 5, 1), 2, users=3).build()


@pytest.mark.parametrize("name", ["behaviour-linear", "patch-behaviour"])
def test_a_record_of_zeros_adds_nothing_to_any_statistic(name: str) -> None:
    """A deployed site has one for each line that is no whole record: as if zeroed out, as a neighbour is."""
    encoded = network(name, BEHAVIOUR, 2).build()
    assert isinstance(encoded, Encoded)
    x = images(6, BEHAVIOUR)
    x[2:4] = 0
    features = encoded.features(x)
    assert features.norm(dim=1).tolist() == pytest.approx([1, 1, 0, 0, 1, 1], abs=1e-5)
    for statistic, seen in [
        (encoded.head_statistics(1.0), features),
        *((layer.statistic, encoded.before(x, k)) for k, layer in enumerate(encoded.learnt)),
    ]:
        rows, y = seen.detach().numpy(), np.array([0, 1, 0, 1, 1, 0])
        there = np.array([0, 1, 4, 5])
        whole = release(statistic, iter([(rows, y)]), None, None, records=6)
        assert np.allclose(whole, release(statistic, iter([(rows[there], y[there])]), None, None, records=6))


def test_a_crbm_computes_probabilities_by_its_polynomial_and_reconstructs() -> None:
    layer = Crbm(2, 3, (5, 5), 0)
    v = torch.rand(4, 2, 9, 9)
    total = layer.total(v, None)
    assert total.shape == (4, 3, 9, 9)
    exact = layer.probability(total, None)
    assert torch.allclose(exact, torch.sigmoid(total))
    squares = [(total[:, max(0, k - 2) : k + 3] ** 2).sum(1) for k in range(3)]
    scale = (2 + 1e-4 * torch.stack(squares, 1)) ** 0.75
    ratio = (total / torch.maximum(total.abs(), scale)).detach()
    by_polynomial = layer.probability(total, approximation("chebyshev", 7)).detach()
    assert by_polynomial.numpy() == pytest.approx(torch.sigmoid(ratio).numpy(), abs=1e-5)
    again = layer.reconstruction(exact, None)
    assert again.shape == v.shape
    # Convolution and reconstruction are adjoint: ⟨W * v, h⟩ = ⟨v, Wᵀ * h⟩.
    with torch.no_grad():
        layer.visible.zero_()
        back = torch.logit(layer.reconstruction(exact, None))
        assert float((total * exact).sum()) == pytest.approx(float((v * back).sum()), rel=1e-3)


def test_the_networks_of_pcdbn_have_the_papers_layers() -> None:
    image = network("cdbn", (1, 28, 28), 10).build()
    assert isinstance(image, Cdbn)
    assert [tuple(layer.filters.shape) for layer in image.layers] == [(32, 1, 5, 5), (64, 32, 5, 5)]  # type: ignore[union-attr]
    assert tuple(image.units.weight.shape) == (1024, 64 * 7 * 7)  # type: ignore[union-attr]
    behaviour = network("cdbn-behaviour", BEHAVIOUR, 2).build()
    assert isinstance(behaviour, Cdbn)
    assert [tuple(layer.filters.shape) for layer in behaviour.layers] == [(10, 1, 4, 12), (10, 10, 2, 6)]  # type: ignore[union-attr]
    x = images(3, BEHAVIOUR)
    assert behaviour(x).shape == (3, 2)
    first = behaviour.layers[0]
    assert isinstance(first, Crbm)
    assert first.dynamic is not None
    assert tuple(first.dynamic.shape) == (31, 11)
