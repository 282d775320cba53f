"""pSGD: DP-SGD through Opacus, the private baseline that every mechanism is compared with.

Reference: Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1.

With noise from the operating system's entropy, Opacus still computes each record's gradient and counts the
steps; sums are exact, noise is discrete, and samples are drawn from the same entropy.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from opacus.accountants import PRVAccountant
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping, GradSampleModuleNoOp
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from opacus.validators import ModuleValidator
from torch import nn
from torch.optim import Optimizer

from fed_dp.accounting import SampledGaussian
from fed_dp.clients.psgd import Psgd
from fed_dp.clients.psgd.batch import noise_source, sampler, train_batch
from fed_dp.clients.trainer import ClientData, Fit, FitRequest, State
from fed_dp.errors import ModelError, PrivacyError
from fed_dp.mechanisms import NoiseSource, SecureNoise
from fed_dp.mechanisms.noise import ExactSum
from fed_dp.models import FlatNetwork, Vector
from fed_dp.models.client_batches import best_batch, per_record_gradients, without_layout
from fed_dp.models.independence import check_independent, check_independent_loss
from fed_dp.models.optimizers import optimizer_of
from fed_dp.models.perceptrons import Chain
from fed_dp.sharing.update import MAX_ABS_VALUE

GHOST_FROM = 20_000  # parameters; below, per-record gradients are cheaper than two backward passes
VMAP_FROM = 20_000  # parameters of a convolutional network; below, hooks are a little faster


class PsgdTrainer:
    """Noisy SGD on Poisson samples of the site's records, each record's gradient clipped to `clip`.

    Guarantee: one fit is the subsampled Gaussian mechanism that `release` describes; proved.
    Neighbours: zero out one record of the site, whose number of records is public; or add or remove one,
    where sums are divided by a declared number instead.
    Opacus counts the steps, and a fit that took more than were charged is not sent. Weights stay
    within ±MAX_ABS_VALUE, where activations and gradients are finite: clipping does not bound NaN.
    """

    is_private = True

    def __init__(
        self,
        config: Psgd,
        net: FlatNetwork,
        *,
        release: SampledGaussian,
        noise_source: NoiseSource = "simulation",
        clients_at_once: int | None = None,
    ) -> None:
        if problems := ModuleValidator.validate(net.trained, strict=False):
            raise ModelError(f"model.name = {net.name!r} cannot be trained by 'psgd': {problems[0]}")
        if not any(hasattr(p, "_forward_counter") for p in net.parameters):  # not hooked by Opacus yet
            check_independent(net.network, net.shape, name=net.name)
            check_independent_loss(net.task, net.network, net.shape, net.spec.classes)
        self._config, self._net, self._release = config, net, release
        self._noise = SecureNoise() if noise_source == "secure" else None
        plain = config.gradients == "auto" and config.optimizer == "sgd" and not config.weight_decay
        batched = self._noise is None and plain and clients_at_once != 1
        self._chain = Chain.of(net) if batched else None
        if self._chain is None and clients_at_once not in (None, 1):
            raise ModelError(
                f"clients.together = {clients_at_once}: with trainer.name = 'psgd', each client of "
                f"model.name = {net.name!r} is trained alone; allowed: 'auto', 1"
            )
        self.clients_at_once = 1 if self._chain is None else best_batch(net, clients_at_once)
        self._gradients = self._method()
        self._module = self._hooked() if self._chain is None else net.trained

    def _method(self) -> str:
        """Choose by measurement; what must be exact has every record's gradient written down."""
        if self._noise is not None or self._config.gradients != "auto":
            return "hooks" if self._noise is not None else self._config.gradients
        if any(isinstance(layer, nn.Conv2d) for layer in self._net.network.modules()):
            return "vmap" if self._net.size >= VMAP_FROM else "hooks"
        return "ghost" if self._net.size >= GHOST_FROM else "hooks"

    def _hooked(self) -> nn.Module:
        trained = without_layout(self._net)  # Opacus' convolutions take memory to be in torch's usual order
        if self._gradients == "ghost":
            return GradSampleModuleFastGradientClipping(  # type: ignore[no-any-return]
                trained, max_grad_norm=self._config.clip, use_ghost_clipping=True
            )
        if self._gradients == "vmap":
            return GradSampleModuleNoOp(trained)  # type: ignore[no-any-return]
        return GradSampleModule(trained)  # type: ignore[no-any-return]

    def fit(self, weights: Vector, data: ClientData, state: State) -> Fit:
        """Run the noisy steps of a round."""
        if self._chain is not None:
            return self.fit_batch([FitRequest(weights, data, state)])[0]
        net = self._net
        accountant = PRVAccountant()
        net.load(weights)
        self._module.train()
        with warnings.catch_warnings():  # the first layer's inputs need no gradient, as they should
            warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
            if self._noise is None:
                self._steps(data, accountant)
            else:
                self._exact_steps(data, accountant, self._noise)
        return self._fit(net.weights(), weights, accountant)

    def fit_batch(self, requests: Sequence[FitRequest]) -> list[Fit]:
        """Run the noisy steps of several clients' round; each has its own samples, noise and accountant."""
        assert self._chain is not None  # else `clients_at_once` is 1
        accountants = [PRVAccountant() for _ in requests]
        after = train_batch(self._config, self._net, self._chain, self._release, requests, accountants)
        return [
            self._fit(weights, request.weights, accountant)
            for weights, request, accountant in zip(after, requests, accountants, strict=True)
        ]

    def _fit(self, after: Vector, before: Vector, accountant: PRVAccountant) -> Fit:
        taken = [SampledGaussian(*entry) for entry in accountant.history]
        if taken != [self._release]:
            raise PrivacyError(f"Opacus counted {taken}, {self._release} was charged; nothing was sent")
        change = np.clip(after - before, -MAX_ABS_VALUE, MAX_ABS_VALUE)  # what a message may hold
        return Fit(change, {"steps": float(self._release.steps)})

    def _steps(self, data: ClientData, accountant: PRVAccountant) -> None:
        config, net, module = self._config, self._net, self._module
        ghost = self._gradients == "ghost"
        make = DPOptimizerFastGradientClipping if ghost else DPOptimizer
        optimizer = make(
            self._optimizer(),
            noise_multiplier=self._release.noise_multiplier,
            max_grad_norm=config.clip,
            expected_batch_size=config.sample_rate * data.expected_records,
            generator=noise_source(net, data),
        )
        optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(config.sample_rate))
        loss = DPLossFastGradientClipping(module, optimizer, net.loss, "mean") if ghost else net.loss
        x, y = net.inputs(data.x), net.targets(data.y)
        each = per_record_gradients(net) if self._gradients == "vmap" else None
        for rows in sampler(config, data):
            optimizer.zero_grad()
            if each is None:
                loss(module(x[rows]), y[rows]).backward()
            else:
                for parameter, gradients in zip(net.parameters, each(x[rows], y[rows]), strict=True):
                    parameter.grad_sample = gradients  # type: ignore[attr-defined]
            optimizer.step()
            net.clamp(MAX_ABS_VALUE)  # post-processing; keeps every record's gradient finite
        optimizer.zero_grad(set_to_none=True)

    def _optimizer(self) -> Optimizer:
        """Return what takes the noisy steps: post-processing, whatever it is."""
        config = self._config
        return optimizer_of(
            config.optimizer,
            self._module.parameters(),
            learning_rate=config.learning_rate,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
        )

    def _exact_steps(self, data: ClientData, accountant: PRVAccountant, noise: SecureNoise) -> None:
        config, net, module = self._config, self._net, self._module
        rate, records = self._release.sample_rate, len(data.y)
        # A record's gradient is of norm C at most; sums of more than that saturate (see ExactSum).
        noise.check(
            self._config.clip * data.expected_records,
            scale=self._release.noise_multiplier * self._config.clip,
        )
        optimizer = ExactOptimizer(
            self._optimizer(),
            noise_multiplier=self._release.noise_multiplier,
            max_grad_norm=config.clip,
            expected_batch_size=rate * data.expected_records,
            noise=noise,
        )
        optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(config.sample_rate))
        loss, labels = net.loss, net.targets(data.y)
        for _ in range(config.steps_per_round):
            optimizer.zero_grad()
            for row in drawn(records, rate):  # one at a time, see ExactOptimizer
                loss(module(net.inputs(data.x[row : row + 1])), labels[row : row + 1]).backward()
                optimizer.add()
            optimizer.step()
            net.clamp(MAX_ABS_VALUE)
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
        self._sum = ExactSum(sum(p.numel() for p in self.params))

    def add(self) -> None:
        """Add one record's clipped gradient."""
        gradient = np.concatenate([g.double().cpu().numpy().ravel() for g in self.grad_samples])
        if not np.isfinite(gradient).all():
            gradient[:] = 0
        norm = float(np.linalg.norm(gradient))
        gradient *= min(1.0, self.max_grad_norm * (1 - 1e-12) / max(norm, 1e-300))
        self._sum.add(self._noise.whole(gradient, scale=self._scale))
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
        noisy = torch.from_numpy(self._noise.gaussian_on_whole(self._sum.taken(), scale=self._scale))
        start = 0
        for p in self.params:
            p.grad = noisy[start : start + p.numel()].view_as(p).to(p)
            start += p.numel()
