"""DP-SGD of several virtual clients at once: perceptrons side by side, each with its own samples and noise.

Samples come from Opacus' sampler and steps are counted by Opacus' accountant, as in the loop through its
optimizer, to which this is equal but for rounding: same samples, same clipping, same noise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from opacus.accountants import PRVAccountant
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import Tensor

from fed_dp.accounting import SampledGaussian
from fed_dp.clients.features import FeatureCache
from fed_dp.clients.psgd import AUTOMATIC_FLOOR, Clipping, Psgd
from fed_dp.clients.trainer import ClientData, FitRequest
from fed_dp.models import FlatNetwork, Vector
from fed_dp.models.client_batches import Batches, descend
from fed_dp.models.flat import flat_rows
from fed_dp.models.perceptrons import Chain, Perceptrons, gradients_into, square_norms
from fed_dp.models.streams import torch_generator
from fed_dp.sharing.update import MAX_ABS_VALUE

IN_CACHE = 4_000_000  # bytes of the batches that are trained side by side


@torch.no_grad()
def train_batch(
    config: Psgd,
    net: FlatNetwork,
    chain: Chain,
    release: SampledGaussian,
    features: FeatureCache,
    requests: Sequence[FitRequest],
    rates: Sequence[float],
    accountants: Sequence[PRVAccountant],
) -> list[Vector]:
    """Run the noisy steps of a round; return each client's weights after it.

    A record's gradient in a linear layer is an outer product, so its norm is known before it is written
    down, and the clipped gradients are summed by one product (ghost clipping). Noise N(0, σ²C²) is
    added to the sum, which is divided by the expected size of a sample. Only as many clients are trained side
    by side as have batches that fit into the caches together.
    """
    x = [features.inputs(request.weights, request.data) for request in requests]
    rows = max(1.0, config.sample_rate * max(map(len, x)))
    at_once = max(1, int(IN_CACHE / (rows * x[0][0].nbytes)))
    after: list[Vector] = []
    for first in range(0, len(requests), at_once):
        part = slice(first, first + at_once)
        after += _trained(
            config, net, chain, release, requests[part], x[part], rates[part], accountants[part]
        )
    return after


def _trained(
    config: Psgd,
    net: FlatNetwork,
    chain: Chain,
    release: SampledGaussian,
    requests: Sequence[FitRequest],
    x: Sequence[Tensor],
    learning_rates: Sequence[float],
    accountants: Sequence[PRVAccountant],
) -> list[Vector]:
    count, trained = len(requests), net.trained_part
    nets = Perceptrons(chain, [request.weights[trained] for request in requests], net.device)
    y = [net.targets(request.data.y) for request in requests]
    batches = Batches(x, y, 1)
    samples = [iter(sampler(config, request.data)) for request in requests]
    sources = [noise_source(net, request.data) for request in requests]
    noise = [torch.empty_like(each) for each in nets.parameters]
    moves = [torch.zeros_like(each) for each in noise] if config.momentum else noise
    rates = torch.tensor(
        [
            rate / (config.sample_rate * request.data.expected_records)
            for rate, request in zip(learning_rates, requests, strict=True)
        ],
        device=net.device,
    )
    deviation = release.noise_multiplier * config.clip
    for rows in zip(*samples, strict=True):
        chosen = [torch.tensor(each, dtype=torch.int64, device=net.device) for each in rows]
        inputs, labels, there = batches.gather(chosen)
        values = nets.forward(inputs.flatten(2))
        pulls = nets.backward(values, labels, there)
        norms = square_norms(chain, values, pulls).sqrt_()
        factors = clip_factors(norms, clip=config.clip, clipping=config.clipping)
        for pull in pulls:
            pull *= factors[:, :, None]
        for part in noise:
            for k in range(count):
                part[k].normal_(0, deviation, generator=sources[k])
        gradients_into(chain.by_layer(noise), values, pulls)
        for parameter, move, part in zip(nets.parameters, moves, noise, strict=True):
            if config.momentum:
                move.mul_(config.momentum).add_(part)
            descend(parameter, move, rates)
            parameter.clamp_(
                -MAX_ABS_VALUE, MAX_ABS_VALUE
            )  # post-processing; keeps every record's gradient finite
        for accountant in accountants:
            accountant.step(noise_multiplier=release.noise_multiplier, sample_rate=config.sample_rate)
    after = []
    for request, row in zip(requests, flat_rows(nets.parameters).cpu().numpy(), strict=True):
        weights = request.weights.copy()
        weights[trained] = row
        after.append(weights)
    return after


def clip_factors(norms: Tensor, *, clip: float, clipping: Clipping) -> Tensor:
    """Return by what gradients of some norms are multiplied: afterwards none is longer than `clip`."""
    if clipping == "automatic":
        return clip / (norms + AUTOMATIC_FLOOR)
    return (clip / (norms + 1e-6)).clamp_(max=1.0)  # as Opacus has it


def sampler(config: Psgd, data: ClientData) -> UniformWithReplacementSampler:
    """Return the Poisson samples of a client's round."""
    source = torch_generator(data.seed, "psgd sampling", data.server_round, data.client)
    return UniformWithReplacementSampler(
        num_samples=len(data.y),
        sample_rate=config.sample_rate,
        generator=source,
        steps=config.steps_per_round,
    )


def noise_source(net: FlatNetwork, data: ClientData) -> torch.Generator:
    """Return where the noise of a client's round comes from."""
    return torch_generator(data.seed, "psgd noise", data.server_round, data.client, device=net.device)
