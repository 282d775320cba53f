"""pSGD: DP-SGD through Opacus, the private baseline that every mechanism is compared with.

Reference: Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1.

With noise from the operating system's entropy, Opacus still computes each record's gradient and counts the
steps; sums are exact, noise is discrete, and samples are drawn from the same entropy.
"""

from __future__ import annotations

import math
import os
import warnings
from typing import Any

import numpy as np
import torch
from opacus.accountants import PRVAccountant
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from opacus.validators import ModuleValidator
from torch import nn

from fed_dp import seeds
from fed_dp.accounting import SampledGaussian
from fed_dp.clients.trainer import Fit, Site, State
from fed_dp.errors import ModelError, PrivacyError
from fed_dp.experiment import Psgd
from fed_dp.mechanisms import NoiseSource, SecureNoise
from fed_dp.models import FlatNetwork, Vector
from fed_dp.sharing.update import LARGEST

GHOST_FROM = 20_000  # parameters; below, per-record gradients are cheaper than two backward passes


class PsgdTrainer:
    """Noisy SGD on Poisson samples of the site's records, each record's gradient clipped to `clip`.

    Guarantee: one fit is the subsampled Gaussian mechanism that `release` describes; proved.
    Neighbours: add or remove one record of the site. The number of records is public.
    Opacus counts the steps, and a fit that took more than were charged is not sent. Weights stay
    within ±LARGEST, where activations and gradients are finite: clipping does not bound NaN.
    """

    spends = True

    def __init__(
        self,
        config: Psgd,
        net: FlatNetwork,
        *,
        release: SampledGaussian,
        noise_source: NoiseSource = "simulation",
    ) -> None:
        if problems := ModuleValidator.validate(net.network, strict=False):
            raise ModelError(f"model.name = {net.name!r} cannot be trained by 'psgd': {problems[0]}")
        self._config, self._net, self._release = config, net, release
        self._noise = SecureNoise() if noise_source == "secure" else None
        ghost = config.gradients == "ghost" or (config.gradients == "auto" and _prefers_ghost(net))
        ghost = ghost and self._noise is None
        self._module = (
            GradSampleModuleFastGradientClipping(
                net.trained, max_grad_norm=config.clip, use_ghost_clipping=True
            )
            if ghost
            else GradSampleModule(net.trained)
        )

    def fit(self, weights: Vector, site: Site, state: State) -> Fit:
        """Run the noisy steps of a round."""
        net, release = self._net, self._release
        accountant = PRVAccountant()
        net.load(weights)
        self._module.train()
        with warnings.catch_warnings():  # the first layer's inputs need no gradient, as they should
            warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
            if self._noise is None:
                self._steps(site, accountant)
            else:
                self._exact_steps(site, accountant, self._noise)
        taken = [SampledGaussian(*entry) for entry in accountant.history]
        if taken != [release]:
            raise PrivacyError(f"Opacus counted {taken}, {release} was charged; nothing was sent")
        change = np.clip(net.weights() - weights, -LARGEST, LARGEST)  # what a message may hold
        return Fit(change, {"steps": float(release.steps)})

    def _steps(self, site: Site, accountant: PRVAccountant) -> None:
        config, net, module = self._config, self._net, self._module
        ghost = isinstance(module, GradSampleModuleFastGradientClipping)
        place = (site.round, site.client)
        noise = torch.Generator(net.device).manual_seed(seeds.integer(site.seed, "psgd noise", *place))
        sampling = torch.Generator().manual_seed(seeds.integer(site.seed, "psgd sampling", *place))
        make = DPOptimizerFastGradientClipping if ghost else DPOptimizer
        optimizer = make(
            torch.optim.SGD(module.parameters(), config.learning_rate, momentum=config.momentum),
            noise_multiplier=self._release.noise_multiplier,
            max_grad_norm=config.clip,
            expected_batch_size=config.sample_rate * len(site.y),
            generator=noise,
        )
        optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(config.sample_rate))
        loss = DPLossFastGradientClipping(module, optimizer, nn.NLLLoss(), "mean") if ghost else nn.NLLLoss()
        x, y = net.inputs(site.x), torch.from_numpy(site.y).to(net.device)
        batches = UniformWithReplacementSampler(
            num_samples=len(y),
            sample_rate=config.sample_rate,
            generator=sampling,
            steps=config.steps_per_round,
        )
        for rows in batches:
            optimizer.zero_grad()
            loss(module(x[rows]), y[rows]).backward()
            optimizer.step()
            net.clamp(LARGEST)  # post-processing; keeps every record's gradient finite
        optimizer.zero_grad(set_to_none=True)

    def _exact_steps(self, site: Site, accountant: PRVAccountant, noise: SecureNoise) -> None:
        config, net, module = self._config, self._net, self._module
        rate, records = self._release.sample_rate, len(site.y)
        optimizer = ExactOptimizer(
            torch.optim.SGD(module.parameters(), config.learning_rate, momentum=config.momentum),
            noise_multiplier=self._release.noise_multiplier,
            max_grad_norm=config.clip,
            expected_batch_size=rate * records,
            noise=noise,
        )
        optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(config.sample_rate))
        loss, labels = nn.NLLLoss(), torch.from_numpy(site.y).to(net.device)
        for _ in range(config.steps_per_round):
            optimizer.zero_grad()
            for row in drawn(records, rate):  # one at a time, see ExactOptimizer
                loss(module(net.inputs(site.x[row : row + 1])), labels[row : row + 1]).backward()
                optimizer.add()
            optimizer.step()
            net.clamp(LARGEST)
        optimizer.zero_grad(set_to_none=True)


def drawn(records: int, rate: float) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Draw a Poisson sample from the operating system's entropy; its chances are `rate`, or a hair less."""
    words = np.frombuffer(os.urandom(8 * records), np.uint64) >> np.uint64(11)
    return np.flatnonzero(words < np.uint64(math.floor(rate * 2**53)))


class ExactOptimizer(DPOptimizer):  # type: ignore[misc]  # Opacus is not typed
    """Opacus' optimizer with exact sums and discrete Gaussian noise from the operating system's entropy.

    Each record's gradient is clipped to C and cut to whole multiples of a fine power of two; these
    are added without rounding. Gradients are computed one at a time: in a batch, how a record's is rounded
    depends on its place, hence on the others. So one record moves the sum by at most C.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, noise: SecureNoise, **rest: Any) -> None:
        super().__init__(optimizer, **rest)
        self._noise = noise
        self._scale = self.noise_multiplier * self.max_grad_norm
        self._sum = np.zeros(sum(p.numel() for p in self.params), np.int64)

    def add(self) -> None:
        """Add one record's clipped gradient."""
        gradient = np.concatenate([g.double().cpu().numpy().ravel() for g in self.grad_samples])
        if not np.isfinite(gradient).all():
            gradient[:] = 0
        norm = float(np.linalg.norm(gradient))
        gradient *= min(1.0, self.max_grad_norm * (1 - 1e-12) / max(norm, 1e-300))
        self._sum += self._noise.whole(gradient, scale=self._scale)
        for p in self.params:
            p.grad_sample = None

    def pre_step(self, closure: Any = None) -> Any:
        """Note that there was one batch, as Opacus counts them; what it held is added up already."""
        for p in self.params:
            p.grad_sample = torch.zeros((0, *p.shape))
        return super().pre_step(closure)

    def clip_and_accumulate(self) -> None:
        """Do nothing: `add` has."""

    def add_noise(self) -> None:
        """Put the noisy sum in place of the gradient."""
        noisy = torch.from_numpy(self._noise.gaussian_on_whole(self._sum, scale=self._scale))
        self._sum[:] = 0
        start = 0
        for p in self.params:
            p.grad = noisy[start : start + p.numel()].view_as(p).to(p)
            start += p.numel()


def _prefers_ghost(net: FlatNetwork) -> bool:
    """Choose by measurement: ghost clipping is 5–15 × faster on large MLPs, slower elsewhere."""
    has_convolution = any(isinstance(layer, nn.Conv2d) for layer in net.network.modules())
    return net.size >= GHOST_FROM and not has_convolution
