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
from fed_dp.clients.trainer import Site, Task
from fed_dp.experiment import Psgd
from fed_dp.models import FlatNetwork, Vector
from fed_dp.models.flat import flat_rows
from fed_dp.models.perceptrons import Chain, Perceptrons, gradients_into, square_norms
from fed_dp.models.side_by_side import Batches, descend
from fed_dp.models.streams import torch_generator
from fed_dp.sharing.update import LARGEST


@torch.no_grad()
def psgd_together(
    config: Psgd,
    net: FlatNetwork,
    chain: Chain,
    release: SampledGaussian,
    tasks: Sequence[Task],
    accountants: Sequence[PRVAccountant],
) -> list[Vector]:
    """Run the noisy steps of a round; return each client's weights after it.

    A record's gradient in a linear layer is an outer product, so its norm is known before it is written
    down, and the clipped gradients are summed by one product (ghost clipping). Noise N(0, σ²C²) is
    added to the sum, which is divided by the expected size of a sample.
    """
    count = len(tasks)
    nets = Perceptrons(chain, [task.weights for task in tasks], net.device)
    x = [net.inputs(task.site.x) for task in tasks]
    y = [torch.from_numpy(task.site.y).to(net.device) for task in tasks]
    batches = Batches(x, y, 1)
    samples = [iter(sampler(config, task.site)) for task in tasks]
    sources = [noise_source(net, task.site) for task in tasks]
    noise = [torch.empty_like(each) for each in nets.parameters]
    moves = [torch.zeros_like(each) for each in noise] if config.momentum else noise
    rates = torch.tensor(
        [config.learning_rate / (config.sample_rate * task.site.expected_records) for task in tasks],
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
            parameter.clamp_(-LARGEST, LARGEST)  # post-processing; keeps every record's gradient finite
        for accountant in accountants:
            accountant.step(noise_multiplier=release.noise_multiplier, sample_rate=config.sample_rate)
    return list(flat_rows(nets.parameters).cpu().numpy())


def sampler(config: Psgd, site: Site) -> UniformWithReplacementSampler:
    """Return the Poisson samples of a client's round."""
    source = torch_generator(site.seed, "psgd sampling", site.round, site.client)
    return UniformWithReplacementSampler(
        num_samples=len(site.y),
        sample_rate=config.sample_rate,
        generator=source,
        steps=config.steps_per_round,
    )


def noise_source(net: FlatNetwork, site: Site) -> torch.Generator:
    """Return where the noise of a client's round comes from."""
    return torch_generator(site.seed, "psgd noise", site.round, site.client, device=net.device)
