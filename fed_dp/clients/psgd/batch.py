"""DP-SGD of several virtual clients at once: perceptrons side by side, each with its own samples and noise.

Samples come from Opacus' sampler and steps are counted by Opacus' accountant, as in the loop through its
optimizer, to which this is equal but for rounding: same samples, same clipping, same noise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from opacus.accountants import PRVAccountant
from opacus.utils.uniform_sampler import UniformWithReplacementSampler

from fed_dp.accounting import SampledGaussian
from fed_dp.clients.psgd import Psgd
from fed_dp.clients.trainer import ClientData, FitRequest
from fed_dp.models import FlatNetwork, Vector
from fed_dp.models.client_batches import Batches, descend
from fed_dp.models.flat import flat_rows
from fed_dp.models.perceptrons import Chain, Perceptrons, gradients_into, square_norms
from fed_dp.models.streams import torch_generator
from fed_dp.sharing.update import MAX_ABS_VALUE


@torch.no_grad()
def train_batch(
    config: Psgd,
    net: FlatNetwork,
    chain: Chain,
    release: SampledGaussian,
    requests: Sequence[FitRequest],
    accountants: Sequence[PRVAccountant],
) -> list[Vector]:
    """Run the noisy steps of a round; return each client's weights after it.

    A record's gradient in a linear layer is an outer product, so its norm is known before it is written
    down, and the clipped gradients are summed by one product (ghost clipping). Noise N(0, σ²C²) is
    added to the sum, which is divided by the expected size of a sample.
    """
    count = len(requests)
    nets = Perceptrons(chain, [request.weights for request in requests], net.device)
    x = [net.inputs(request.data.x) for request in requests]
    y = [net.targets(request.data.y) for request in requests]
    batches = Batches(x, y, 1)
    samples = [iter(sampler(config, request.data)) for request in requests]
    sources = [noise_source(net, request.data) for request in requests]
    noise = [torch.empty_like(each) for each in nets.parameters]
    moves = [torch.zeros_like(each) for each in noise] if config.momentum else noise
    rates = torch.tensor(
        [config.learning_rate / (config.sample_rate * request.data.expected_records) for request in requests],
        device=net.device,
    )
    deviation = release.noise_multiplier * config.clip
    for rows in zip(*samples, strict=True):
        chosen = [torch.tensor(each, dtype=torch.int64, device=net.device) for each in rows]
        inputs, labels, there = batches.gather(chosen)
        values = nets.forward(inputs.flatten(2))
        pulls = nets.backward(values, labels, there)
        norms = square_norms(values, pulls).sqrt_()
        factors = (config.clip / (norms + 1e-6)).clamp_(max=1.0)  # as Opacus has it
        for pull in pulls:
            pull *= factors[:, :, None]
        for part in noise:
            for k in range(count):
                part[k].normal_(0, deviation, generator=sources[k])
        gradients_into(noise, values, pulls)
        for parameter, move, part in zip(nets.parameters, moves, noise, strict=True):
            if config.momentum:
                move.mul_(config.momentum).add_(part)
            descend(parameter, move, rates)
            parameter.clamp_(
                -MAX_ABS_VALUE, MAX_ABS_VALUE
            )  # post-processing; keeps every record's gradient finite
        for accountant in accountants:
            accountant.step(noise_multiplier=release.noise_multiplier, sample_rate=config.sample_rate)
    return list(flat_rows(nets.parameters).cpu().numpy())


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
