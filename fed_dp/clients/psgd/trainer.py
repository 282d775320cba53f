"""pSGD: DP-SGD through Opacus, the private baseline that every mechanism is compared with.

Reference: Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1.

With noise from the operating system's entropy, Opacus still computes each record's gradient and counts the
steps; sums are exact, noise is discrete, and samples are drawn from the same entropy.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from opacus.accountants import PRVAccountant
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping, GradSampleModuleNoOp
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.optim import Optimizer

from fed_dp.accounting import Release, SampledGaussian
from fed_dp.clients.features import FeatureCache
from fed_dp.clients.functional.statistics import EncoderStages, features
from fed_dp.clients.psgd import AUTOMATIC_FLOOR, Clipping, Psgd
from fed_dp.clients.psgd.batch import clip_factors, noise_source, sampler, train_batch
from fed_dp.clients.trainer import ClientData, Fit, FitRequest, State
from fed_dp.errors import ModelError, PrivacyError
from fed_dp.mechanisms import Noise, NoiseSource, SecureNoise
from fed_dp.mechanisms.noise import ExactSum
from fed_dp.models import Encoded, FlatNetwork, Vector
from fed_dp.models.augmentation import Views
from fed_dp.models.client_batches import best_batch, per_record_gradients, without_layout
from fed_dp.models.independence import DROPOUT, check_independent, check_independent_loss
from fed_dp.models.optimizers import optimizer_of
from fed_dp.models.perceptrons import Chain
from fed_dp.models.streams import torch_generator
from fed_dp.sharing.update import MAX_ABS_VALUE

Rate = Callable[..., float]  # the learning rate, by the keyword `records`
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
        rate: Rate | None = None,
    ) -> None:
        if problems := ModuleValidator.validate(net.trained, strict=False):
            raise ModelError(f"model.name = {net.name!r} cannot be trained by 'psgd': {problems[0]}")
        if config.augmentations > 1 and len(net.shape) != 3:
            raise ModelError(
                f"trainer.augmentations = {config.augmentations}: views are of images; the data has "
                f"shape {net.shape}"
            )
        if not any(hasattr(p, "_forward_counter") for p in net.parameters):  # not hooked by Opacus yet
            encoder = features if isinstance(net.network, Encoded) else None
            check_independent(net.network, net.shape, name=net.name, seen=encoder)
            check_independent_loss(net.task, net.network, net.shape, net.spec.classes)
        self._config, self._net, self._release = config, net, release
        self._rate = rate or (lambda *, records: float(config.learning_rate))
        self._noise = SecureNoise() if noise_source == "secure" else None
        plain = config.gradients == "auto" and config.optimizer == "sgd" and not config.weight_decay
        batched = self._noise is None and plain and config.augmentations == 1 and clients_at_once != 1
        self._views = Views(config.augmentations, shift=config.shift, flip=config.flip)
        self._fresh_views = config.augmentations > 1 and net.trained is net.network
        self._features = FeatureCache(net, self._views)
        self._chain = Chain.of(net) if batched else None
        if self._chain is None and clients_at_once not in (None, 1):
            raise ModelError(
                f"clients.together = {clients_at_once}: with trainer.name = 'psgd', each client of "
                f"model.name = {net.name!r} is trained alone; allowed: 'auto', 1"
            )
        self.clients_at_once = 1 if self._chain is None else best_batch(net, clients_at_once)
        self._drops = any(isinstance(layer, DROPOUT) for layer in net.trained.modules())
        self._gradients = self._method()
        self._module = self._hooked() if self._chain is None else net.trained

    def _method(self) -> str:
        """Choose by measurement; what must be exact has every record's gradient written down."""
        config, net = self._config, self._net
        if config.augmentations > 1:
            return "vmap"
        hooks = hookable(net.trained, net.inputs(np.zeros((1, *net.shape), np.float32)))
        if config.gradients in ("hooks", "ghost") and not hooks:
            raise ModelError(
                f"trainer.gradients = {config.gradients!r}: model.name = {net.name!r} has parameters outside "
                "of the layers that Opacus' hooks know; allowed: auto, vmap"
            )
        if config.gradients != "auto":
            return config.gradients
        if not hooks:
            return "vmap"
        if self._noise is not None:
            return "hooks"
        if any(isinstance(layer, nn.Conv2d) for layer in net.trained.modules()):
            return "vmap" if net.size >= VMAP_FROM else "hooks"
        return "ghost" if sum(p.numel() for p in net.trained.parameters()) >= GHOST_FROM else "hooks"

    def _hooked(self) -> nn.Module:
        trained = without_layout(self._net)  # Opacus' convolutions take memory to be in torch's usual order
        if self._gradients == "ghost":
            return GhostClipping(self._config, trained)
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
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # The first layer's inputs need no gradient, as they should.
            warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
            if self._noise is None:
                source = torch_generator(data.seed, "psgd dropout", data.server_round, data.client)
                torch.set_rng_state(source.get_state())
                self._steps(weights, data, accountant)
            else:
                self._exact_steps(weights, data, accountant, self._noise)
        return self._fit(net.weights(), weights, accountant)

    def fit_batch(self, requests: Sequence[FitRequest]) -> list[Fit]:
        """Run the noisy steps of several clients' round; each has its own samples, noise and accountant."""
        assert self._chain is not None  # else `clients_at_once` is 1
        accountants = [PRVAccountant() for _ in requests]
        rates = [self._rate(records=request.data.expected_records) for request in requests]
        after = train_batch(
            self._config, self._net, self._chain, self._release, self._features, requests, rates, accountants
        )
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

    def _steps(self, weights: Vector, data: ClientData, accountant: PRVAccountant) -> None:
        config, net, module = self._config, self._net, self._module
        ghost = self._gradients == "ghost"
        # Ghost clipping is the module's; with automatic clipping, gradients are brought to C before the clip.
        per_record = AutomaticOptimizer if config.clipping == "automatic" else DPOptimizer
        make = DPOptimizerFastGradientClipping if ghost else per_record
        optimizer = make(
            self._optimizer(data),
            noise_multiplier=self._release.noise_multiplier,
            max_grad_norm=config.clip,
            expected_batch_size=config.sample_rate * data.expected_records,
            generator=noise_source(net, data),
        )
        optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(config.sample_rate))
        loss = DPLossFastGradientClipping(module, optimizer, net.loss, "mean") if ghost else net.loss
        x, y = self._features.inputs(weights, data), net.targets(data.y)
        gradients = self._gradients_by(loss)
        views = torch_generator(data.seed, "psgd views", data.server_round, data.client)
        for rows in sampler(config, data):
            optimizer.zero_grad()
            batch = self._views.of(x[rows], views) if self._fresh_views else x[rows]
            gradients(batch, y[rows])
            optimizer.step()
            net.clamp(MAX_ABS_VALUE)  # post-processing; keeps every record's gradient finite
        optimizer.zero_grad(set_to_none=True)

    def _gradients_by(self, loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], None]:
        """Return what leaves each record's gradient (or its norm) where Opacus' optimizer looks for it."""
        net, module = self._net, self._module
        if self._gradients != "vmap":
            return lambda x, y: loss(module(x), y).backward()  # type: ignore[no-untyped-call]
        each = per_record_gradients(net, views=self._config.augmentations > 1)
        parameters = [p for p in net.trained.parameters() if p.requires_grad]

        def computed(x: Tensor, y: Tensor) -> None:
            for parameter, gradients in zip(parameters, each(x, y), strict=True):
                parameter.grad_sample = gradients  # type: ignore[attr-defined]

        return computed

    def _optimizer(self, data: ClientData) -> Optimizer:
        """Return what takes the noisy steps: post-processing, whatever it is."""
        config = self._config
        return optimizer_of(
            config.optimizer,
            self._module.parameters(),
            learning_rate=self._rate(records=data.expected_records),
            momentum=config.momentum,
            weight_decay=config.weight_decay,
        )

    def _exact_steps(
        self, weights: Vector, data: ClientData, accountant: PRVAccountant, noise: SecureNoise
    ) -> None:
        config, net = self._config, self._net
        rate, records = self._release.sample_rate, len(data.y)
        # A record's gradient is of norm C at most; sums of more than that saturate (see ExactSum).
        noise.check(
            self._config.clip * data.expected_records,
            scale=self._release.noise_multiplier * self._config.clip,
        )
        optimizer = ExactOptimizer(
            self._optimizer(data),
            noise_multiplier=self._release.noise_multiplier,
            max_grad_norm=config.clip,
            expected_batch_size=rate * data.expected_records,
            noise=noise,
            clipping=config.clipping,
        )
        optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(config.sample_rate))
        labels, gradients = net.targets(data.y), self._gradients_by(net.loss)
        x = self._features.inputs(weights, data, one_by_one=True)
        for _ in range(config.steps_per_round):
            optimizer.zero_grad()
            for row in drawn(records, rate):  # one at a time, see ExactOptimizer
                if self._drops:  # masks of one record must tell nobody who else was in the sample
                    torch.manual_seed(int.from_bytes(os.urandom(8)))
                gradients(x[row : row + 1], labels[row : row + 1])
                optimizer.add()
            optimizer.step()
            net.clamp(MAX_ABS_VALUE)
        optimizer.zero_grad(set_to_none=True)


def hookable(network: nn.Module, example: Tensor) -> bool:
    """Return whether Opacus' hooks see all that has parameters: layers that they know, each called."""
    owners = [
        module
        for module in network.modules()
        if any(p.requires_grad for p in module.parameters(recurse=False))
    ]
    if any(type(module) not in GradSampleModule.GRAD_SAMPLERS for module in owners):
        return False
    called: set[nn.Module] = set()
    handles = [module.register_forward_hook(lambda m, *_: called.add(m)) for module in owners]
    try:
        with torch.no_grad():
            network(example)
    finally:
        for handle in handles:
            handle.remove()
    return called == set(owners)


class LearntPsgdTrainer(PsgdTrainer):
    """The same on a network with learnt layers: their moments are released first, one layer a round.

    Guarantee: that of `statistics.release` for each layer, and that of PsgdTrainer on the head, composed;
    proved.
    """

    def __init__(
        self, config: Psgd, net: FlatNetwork, *, stages: tuple[Release, ...], step: float, **options: Any
    ) -> None:
        super().__init__(config, net, **options)
        self._stages = EncoderStages(net, stages=stages, step=step)

    def stage(self, server_round: int) -> int:
        """Return the stage of a round, from 1."""
        return self._stages.stage(server_round)

    def frozen(self, weights: Vector, stage: int) -> Vector:
        """Return the part of the weights that decides what a stage's statistic is taken of."""
        return self._stages.frozen(weights, stage)

    def release(self, weights: Vector, data: ClientData, stage: int, noise: Noise | None) -> Vector:
        """Return a learnt layer's moments, with noise."""
        return self._stages.release(weights, data, stage, noise)

    def follow(self, weights: Vector, released: Vector, stage: int, *, records: int) -> Fit:
        """Return the change that released moments ask for; no record is needed."""
        return self._stages.follow(weights, released, stage, records=records)


class AutomaticOptimizer(DPOptimizer):  # type: ignore[misc]  # Opacus is not typed
    """Opacus' optimizer with automatic clipping: each gradient is brought to about C, and clipped as ever."""

    def clip_and_accumulate(self) -> None:
        """Bring each record's gradient to C ‖g‖ / (‖g‖ + γ), then let Opacus clip and add them up."""
        samples = self.grad_samples
        if len(samples[0]):
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in samples], 1).norm(dim=1)
            factors = clip_factors(norms, clip=self.max_grad_norm, clipping="automatic")
            for p, g in zip(self.params, samples, strict=True):
                p.grad_sample = g * factors.view(-1, *[1] * (g.dim() - 1))
        super().clip_and_accumulate()


class GhostClipping(GradSampleModuleFastGradientClipping):  # type: ignore[misc]  # Opacus is not typed
    """Opacus' ghost clipping, flat or automatic."""

    def __init__(self, config: Psgd, module: nn.Module) -> None:
        super().__init__(module, max_grad_norm=config.clip, use_ghost_clipping=True)
        self._clipping = config.clipping

    def get_clipping_coef(self) -> torch.Tensor:
        """Return by what each record's gradient is multiplied."""
        if self._clipping == "flat":
            found: torch.Tensor = super().get_clipping_coef()
            return found
        return clip_factors(self.get_norm_sample(), clip=self.max_grad_norm, clipping="automatic")


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

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, noise: SecureNoise, clipping: Clipping, **rest: Any
    ) -> None:
        super().__init__(optimizer, **rest)
        self._noise, self._floor = noise, AUTOMATIC_FLOOR if clipping == "automatic" else None
        self._scale = self.noise_multiplier * self.max_grad_norm
        self._sum = ExactSum(sum(p.numel() for p in self.params))

    def add(self) -> None:
        """Add one record's clipped gradient."""
        gradient = np.concatenate([g.double().cpu().numpy().ravel() for g in self.grad_samples])
        if not np.isfinite(gradient).all():
            gradient[:] = 0
        norm = float(np.linalg.norm(gradient))
        below = self.max_grad_norm * (1 - 1e-12)
        gradient *= (
            min(1.0, below / max(norm, 1e-300)) if self._floor is None else below / (norm + self._floor)
        )
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
