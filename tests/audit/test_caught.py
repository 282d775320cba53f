"""What audits catch: every proved mechanism, on every path of its code, weakened in each way that there is.

The weakened code is what runs: a change of the source, or of the library's that does the work.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer
from opacus.optimizers import optimizer as of_opacus
from opacus.utils.uniform_sampler import UniformWithReplacementSampler

from fed_dp.accounting import composition
from fed_dp.audit import mechanisms
from fed_dp.audit.finding import Finding
from fed_dp.audit.mechanisms import audit_mechanism
from fed_dp.audit.psgd import audit_path
from fed_dp.clients.psgd import PATHS
from fed_dp.clients.psgd import batch as psgd_batch
from fed_dp.clients.psgd import trainer as psgd
from fed_dp.mechanisms import SecureNoise
from tests.mechanisms.privacy_loss import mutant

Patch = pytest.MonkeyPatch
SOURCES = ("simulation", "secure")

# ------------------------------------------------------------------------- mechanisms, exactly

# (mechanism, what is weakened): module and change of its source, and where it is used.
WEAKENED: dict[tuple[str, str], tuple[str, str, str]] = {
    ("laplace", "noise halved"): ("laplace", "scale=2 * bound * max(most, 1)", "scale=bound * max(most, 1)"),
    ("laplace", "clip doubled"): ("laplace", "np.clip(exact, -bound,", "2 * np.clip(exact, -bound,"),
    ("gaussian", "noise halved"): ("gaussian", "scale=multiplier * 2 * clip", "scale=multiplier * clip"),
    ("gaussian", "clip doubled"): ("gaussian", "(clip / norm)", "(2 * clip / norm)"),
    ("random_mask", "noise halved"): ("gaussian", "scale=multiplier * 2 * clip", "scale=multiplier * clip"),
    ("random_mask", "clip doubled"): ("gaussian", "(clip / norm)", "(2 * clip / norm)"),
    ("sparse_vector", "noise halved"): (
        "sparse_vector",
        "2 * count * bound / eps_s",
        "count * bound / eps_s",
    ),
    ("sparse_vector", "count forgotten"): ("sparse_vector", "2 * count * bound / eps_s", "2 * bound / eps_s"),
    ("statistics", "noise halved"): ("statistics", "None else _scale(", "None else 0.5 * _scale("),
    ("statistics", "clip doubled"): ("statistics", "exact * (_BELOW_ONE /", "2 * exact * (_BELOW_ONE /"),
    ("dpme", "noise halved"): ("histogram", "scale = 1 / epsilon", "scale = 0.5 / epsilon"),
    ("dpme", "counted twice"): ("histogram", "np.bincount(cells,", "2 * np.bincount(cells,"),
    ("filter_priority", "noise halved"): ("histogram", "scale = 1 / epsilon", "scale = 0.5 / epsilon"),
    ("filter_priority", "counted twice"): ("histogram", "np.bincount(cells,", "2 * np.bincount(cells,"),
    ("svm", "noise halved"): ("support_vector", "+ ROUNDING)\n    if", "+ ROUNDING) / 2\n    if"),
    ("svm", "C doubled"): ("support_vector", "records = cost / expected,", "records = 2 * cost / expected,"),
}
USED: dict[str, tuple[tuple[str, str], ...]] = {
    "laplace": (("fed_dp.audit.mechanisms", "laplace"),),
    "gaussian": (("fed_dp.audit.mechanisms", "gaussian"),),
    "random_mask": (("fed_dp.sharing.private_selection", "gaussian"),),
    "sparse_vector": (("fed_dp.audit.mechanisms", "sparse_vector"),),
    "statistics": tuple(
        ("fed_dp.audit.mechanisms", name)
        for name in ("HeadStatistics", "MapMoments", "PatchMoments", "ClassSums", "NoiseSpec", "release")
    ),
    "dpme": (("fed_dp.audit.mechanisms", "noisy_histogram"),),
    "filter_priority": (("fed_dp.audit.mechanisms", "filter_priority"),),
    "svm": (("fed_dp.audit.mechanisms", "perturbed"), ("fed_dp.audit.mechanisms", "solve")),
}


def on(source: str, found: list[Finding]) -> list[Finding]:
    return [each for each in found if each.subject.endswith(f"{source} noise")]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("mechanism", "weakness"), WEAKENED)
def test_a_weakened_mechanism_is_caught_on_each_path(
    mechanism: str, weakness: str, source: str, monkeypatch: Patch
) -> None:
    assert not any(each.refuted for each in on(source, audit_mechanism(mechanism)))
    module, old, new = WEAKENED[mechanism, weakness]
    weakened = mutant(importlib.import_module(f"fed_dp.mechanisms.{module}"), (old, new))
    for where, name in USED[mechanism]:
        monkeypatch.setattr(f"{where}.{name}", getattr(weakened, name))
    found = on(source, audit_mechanism(mechanism))
    if (mechanism, weakness) == ("statistics", "clip doubled"):  # class sums have bounds in place of a clip
        found = [each for each in found if "class sums" not in each.subject]
    assert found
    assert all(each.refuted for each in found), [each.lines() for each in found if not each.refuted]


def test_sums_that_wrap_or_are_cut_away_from_zero_are_caught(monkeypatch: Patch) -> None:
    """Of the secure path: a record's part that is rounded up, on a grid that is not fine."""
    noise = importlib.import_module("fed_dp.mechanisms.noise")
    monkeypatch.setattr(noise, "FINENESS", 0.05)
    coarse = mutant(noise, ("np.trunc(", "_away("), ("FINENESS = 2.0**-40", "FINENESS = 0.05"))
    coarse.__dict__["_away"] = lambda values: np.sign(values) * np.ceil(np.abs(values))
    monkeypatch.setattr(SecureNoise, "whole", coarse.SecureNoise.whole)
    assert any(each.refuted for each in on("secure", audit_mechanism("statistics")))


# ---------------------------------------------------------------------------- pSGD, measured


def change(patch: Patch, module: Any, name: str, *changes: tuple[str, str]) -> None:
    patch.setattr(module, name, getattr(mutant(module, *changes), name))


def half_of_opacus_noise(patch: Patch) -> None:
    original = of_opacus._generate_noise

    def half(std: float, *rest: Any, **more: Any) -> torch.Tensor:
        return original(std / 2, *rest, **more)

    patch.setattr(of_opacus, "_generate_noise", half)
    from opacus.optimizers import optimizer_fast_gradient_clipping as ghost

    if hasattr(ghost, "_generate_noise"):
        patch.setattr(ghost, "_generate_noise", half)


def half_of_exact_noise(patch: Patch) -> None:
    original = SecureNoise.gaussian_on_whole

    def half(self: SecureNoise, whole: np.ndarray, *, scale: float) -> np.ndarray:
        return (original(self, whole, scale=scale) + whole * psgd_grid(scale)) / 2

    patch.setattr(SecureNoise, "gaussian_on_whole", half)


def psgd_grid(scale: float) -> float:
    from fed_dp.mechanisms.noise import grid

    return grid(scale)


def opacus_clips_at_twice(patch: Patch) -> None:
    original = DPOptimizer.clip_and_accumulate

    def twice(self: DPOptimizer) -> None:
        self.max_grad_norm *= 2
        original(self)
        self.max_grad_norm /= 2

    patch.setattr(DPOptimizer, "clip_and_accumulate", twice)


def ghosts_clip_at_twice(patch: Patch) -> None:
    original = GradSampleModuleFastGradientClipping.get_clipping_coef

    def twice(self: Any) -> torch.Tensor:
        self.max_grad_norm *= 2
        found: torch.Tensor = original(self)
        self.max_grad_norm /= 2
        return found

    patch.setattr(GradSampleModuleFastGradientClipping, "get_clipping_coef", twice)


def everybody_is_sampled(patch: Patch) -> None:
    def all_of_them(self: UniformWithReplacementSampler) -> Iterator[list[int]]:
        for _ in range(self.steps):
            yield list(range(self.num_samples))

    patch.setattr(UniformWithReplacementSampler, "__iter__", all_of_them)


def everybody_is_drawn(patch: Patch) -> None:
    patch.setattr(psgd, "drawn", lambda records, rate: np.arange(records))


def one_round_is_calibrated(patch: Patch) -> None:
    original = composition.noise_multiplier

    def for_one(*, steps: int, **more: Any) -> float:
        return original(steps=steps // 5, **more)

    patch.setattr(composition, "noise_multiplier", for_one)


def half_of_the_batches_noise(patch: Patch) -> None:
    change(patch, psgd_batch, "train_batch", ("normal_(0, deviation,", "normal_(0, deviation / 2,"))
    patch.setattr(psgd, "train_batch", psgd_batch.train_batch)


def batches_clip_at_twice(patch: Patch) -> None:
    change(patch, psgd_batch, "train_batch", ("return (clip / (norms", "return (2 * clip / (norms"))
    patch.setattr(psgd, "train_batch", psgd_batch.train_batch)


def batches_are_brought_to_twice(patch: Patch) -> None:
    change(patch, psgd_batch, "train_batch", ("return clip / (norms", "return 2 * clip / (norms"))
    patch.setattr(psgd, "train_batch", psgd_batch.train_batch)


def gradients_are_brought_to_twice(patch: Patch) -> None:
    original = psgd.clip_factors
    patch.setattr(psgd, "clip_factors", lambda norms, **more: 2 * original(norms, **more))
    opacus_clips_at_twice(patch)


def exact_gradients_are_brought_to_twice(patch: Patch) -> None:
    change(patch, psgd, "ExactOptimizer", ("else below / (norm", "else 2 * below / (norm"))


def exact_clips_at_twice(patch: Patch) -> None:
    change(patch, psgd, "ExactOptimizer", ("min(1.0, below /", "min(1.0, 2 * below /"))


Weaken = Callable[[Patch], None]
OPACUS: dict[str, Weaken] = {
    "noise halved": half_of_opacus_noise,
    "clip doubled": opacus_clips_at_twice,
    "sampling off": everybody_is_sampled,
    "a round alone": one_round_is_calibrated,
}
SECURE: dict[str, Weaken] = {
    "noise halved": half_of_exact_noise,
    "clip doubled": exact_clips_at_twice,
    "sampling off": everybody_is_drawn,
    "a round alone": one_round_is_calibrated,
}
PSGD: dict[str, dict[str, Weaken]] = {
    "client batches": {
        **OPACUS, "noise halved": half_of_the_batches_noise, "clip doubled": batches_clip_at_twice,
    },
    "hooks": OPACUS,
    "ghost": {**OPACUS, "clip doubled": ghosts_clip_at_twice},
    "vmap": OPACUS,
    "augmented": OPACUS,
    "secure": SECURE,
    "client batches, automatic clipping": {
        **OPACUS, "noise halved": half_of_the_batches_noise, "clip doubled": batches_are_brought_to_twice,
    },
    "hooks, automatic clipping": {**OPACUS, "clip doubled": gradients_are_brought_to_twice},
    "ghost, automatic clipping": {**OPACUS, "clip doubled": gradients_are_brought_to_twice},
    "secure, automatic clipping": {**SECURE, "clip doubled": exact_gradients_are_brought_to_twice},
}  # fmt: skip


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("path", "weakness"), [(path, weakness) for path, each in PSGD.items() for weakness in each]
)
def test_a_weakened_path_of_psgd_is_caught(path: str, weakness: str, monkeypatch: Patch) -> None:
    PSGD[path][weakness](monkeypatch)
    found = audit_path(path, runs=20)
    assert found.refuted, found.lines()


@pytest.mark.statistical
@pytest.mark.parametrize("path", PATHS)
def test_a_path_of_psgd_as_it_is_loses_nearly_what_is_stated_and_not_more(path: str) -> None:
    found = audit_path(path)
    assert 0.7 * found.claim < found.bound <= found.claim


def test_every_path_is_weakened_in_every_way() -> None:
    assert set(PSGD) == set(PATHS)
    assert {weakness for each in PSGD.values() for weakness in each} == set(OPACUS)
    assert all(set(each) == set(OPACUS) for each in PSGD.values())
    assert {name for name, _ in WEAKENED} | {"psgd"} == set(mechanisms.MECHANISMS) - {
        "sparse_vector_paper", "svm_paper", "sparse_vector_as_printed", "svm_as_printed",
    }  # fmt: skip
