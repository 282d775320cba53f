"""The private support vector machine: hybrid and private SVM, in one release of the weights.

Reference: Li, Xiong, Ohno-Machado, Jiang, "Privacy Preserving RBF Kernel SVM", 2014, Algorithm 1, with C
divided by n (its Eq. 3 as printed is not: that is refuted) and without an intercept.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.svm import SVC, LinearSVC

from fed_dp.accounting import Release
from fed_dp.clients.functional.statistics import batches, features
from fed_dp.clients.trainer import ClientData, Fit, State
from fed_dp.experiment.plan import noise_spec
from fed_dp.mechanisms import Noise
from fed_dp.mechanisms.noise import Reals
from fed_dp.mechanisms.statistics import clipped
from fed_dp.mechanisms.support_vector import SvmNoise, check_size, perturbed, solve
from fed_dp.models import FlatNetwork, Vector
from fed_dp.models.independence import check_independent
from fed_dp.models.kernel import ExactKernelMachine, KernelMachine
from fed_dp.sharing.update import MAX_ABS_VALUE

Signs = NDArray[np.float64]


class Cost(Protocol):
    """C, of the public number of records."""

    def __call__(self, *, records: int) -> float:
        """Return C."""
        ...


TOLERANCE, STEPS = 1e-6, 100_000  # of liblinear


class SvmTrainer:
    """Solve ½‖w‖² + (C/n) Σ loss on the site's records, add noise to w, once; then share that w.

    Guarantee: that of `support_vector.perturbed`; proved. Neighbours: replace one record. Several classes
    are one problem each, against the rest, and share the budget. The upload moves the model by `step` of
    the way to the site's own w: averaged, the model becomes the mean of the sites' by their counts.
    Where there is noise, the loss is the smoothed hinge, which is solved to an accuracy that is known before
    any record is looked at; without noise, the hinge itself. `as_printed`: C is not divided by n, as in
    Eq. 3; then the noise does not suffice. `fixed_steps`: the smoothed hinge also without noise, where a
    selection of the change is what is private: how long liblinear takes depends on the records.
    """

    def __init__(
        self,
        net: FlatNetwork,
        *,
        cost: Cost,
        release: Release | None,
        kind: SvmNoise,
        step: float,
        as_printed: bool = False,
        fixed_steps: bool = False,
    ) -> None:
        assert isinstance(net.network, KernelMachine)  # by schema
        check_independent(net.network, net.shape, name=net.name, seen=features)
        self._cost, self._net, self._network = cost, net, net.network
        self._noise_value = None if release is None else noise_spec(release).value
        self._kind, self._step, self._as_printed = kind, step, as_printed
        self._fixed_steps = fixed_steps
        self.is_private = release is not None
        self._head = net.network.segment(net.network.stages)

    def stage(self, server_round: int) -> int:
        """There is one stage."""
        return 1

    def frozen(self, weights: Vector, stage: int) -> Vector:
        """Return the frequencies."""
        return weights[: self._head.start]

    def release(self, weights: Vector, data: ClientData, stage: int, noise: Noise | None) -> Vector:
        """Return the site's w, with noise."""
        expected = data.expected_records
        cost = self._cost(records=expected)
        private = self._noise_value is not None and noise is not None
        if private and not self._as_printed:
            check_size(cost=cost, expected=expected)
            if len(data.y) > expected:  # what was agreed is for so many; which they are, no record decides
                data = replace(data, x=data.x[:expected], y=data.y[:expected])
        exactly = noise is not None and noise.name == "secure"
        z, signs = self._problems(weights, data, exactly=exactly)
        if (private or self._fixed_steps) and not self._as_printed:
            own = within(solve(z, signs, cost=cost, expected=expected), cost)
        else:
            each = cost if self._as_printed else cost / expected
            own = np.stack([liblinear(z, column, cost=each) for column in signs.T])
        if self._noise_value is not None and noise is not None:
            own = perturbed(
                own,
                cost=cost,
                records=expected,
                problems=len(own),
                kind=self._kind,
                noise_value=self._noise_value,
                noise=noise,
            )
        return np.clip(own.ravel(), -MAX_ABS_VALUE, MAX_ABS_VALUE).astype(np.float32)

    def follow(self, weights: Vector, released: Vector, stage: int, *, records: int) -> Fit:
        """Move towards the site's own w."""
        change = np.zeros_like(weights)
        change[self._head] = np.clip(
            self._step * (released - weights[self._head]), -MAX_ABS_VALUE, MAX_ABS_VALUE
        )
        return Fit(change)

    def fit(self, weights: Vector, data: ClientData, state: State) -> Fit:
        """Release without noise, and follow: for what is not private."""
        released = self.release(weights, data, 1, None)
        return self.follow(weights, released, 1, records=data.expected_records)

    def _problems(self, weights: Vector, data: ClientData, *, exactly: bool) -> tuple[Reals, Signs]:
        """Return z (‖z‖ ≤ 1), and ±1 of every problem: of two classes one, else each against the rest."""
        self._net.load(weights)
        parts = batches(data, self._network.features, device=self._net.device, exactly=exactly)
        z = clipped(np.concatenate([rows for rows, _ in parts]))
        return z, signs_of(data, self._network.head.out_features)


class ExactTrainer:
    """Solve the machine with the kernel itself: it consists of support vectors, which are records.

    No privacy: only for public records. The objective is the same, C/n a record, with an intercept, as
    libsvm (scikit-learn's SVC) has it.
    """

    is_private = False

    def __init__(self, net: FlatNetwork, *, cost: Cost) -> None:
        assert isinstance(net.network, ExactKernelMachine)  # by schema
        self._net, self._network, self._cost = net, net.network, cost

    def fit(self, weights: Vector, data: ClientData, state: State) -> Fit:
        """Return the machine of these records, whatever the weights are."""
        machine, x = self._network, data.x.reshape(len(data.x), -1).astype(np.float64)
        each = self._cost(records=data.expected_records) / data.expected_records
        signs = signs_of(data, len(machine.intercepts))
        solved = [support_vectors(x, column, cost=each, gamma=machine.width**-2) for column in signs.T]
        coefficients = np.stack([alpha for alpha, _ in solved])
        used, intercepts = np.any(coefficients != 0, axis=0), np.array([intercept for _, intercept in solved])
        parts = (np.where(used[:, None], x, 0), coefficients, intercepts)
        found = np.concatenate([part.ravel() for part in parts]).astype(np.float32)
        return Fit(np.clip(found - weights, -MAX_ABS_VALUE, MAX_ABS_VALUE))


def signs_of(data: ClientData, outputs: int) -> Signs:
    """Return ±1 of every problem: of two classes one, else each against the rest."""
    classes = np.array([1]) if outputs == 1 else np.arange(outputs)
    return np.where(data.y[:, None] == classes, 1.0, -1.0)


def support_vectors(x: Reals, signs: Signs, *, cost: float, gamma: float) -> tuple[Reals, float]:
    """Return y α of every record (0: no support vector) and the intercept, as libsvm solves it.

    Records of one class alone are told nothing apart by: then there is the intercept alone.
    """
    alpha = np.zeros(len(x))
    if len(np.unique(signs)) == 1:
        return alpha, float(signs[0])
    machine = SVC(C=cost, kernel="rbf", gamma=gamma, random_state=0).fit(x, signs)
    alpha[machine.support_] = machine.dual_coef_[0]
    return alpha, float(machine.intercept_[0])


def within(weights: Reals, cost: float) -> Reals:
    """Return the nearest w of norm C at most, which any is unless there are more records than expected."""
    norms = np.linalg.norm(weights, axis=1, keepdims=True)
    return np.asarray(weights * np.minimum(1, cost / np.maximum(norms, 1e-300)))


def liblinear(z: Reals, signs: Signs, *, cost: float) -> Reals:
    """Return w of ½‖w‖² + cost · Σ max(0, 1 − y wᵀz), as exact as liblinear (scikit-learn) gets it.

    For what is not private. Two records z = 0, one of each class, join: their loss is 1 whatever w is, and
    liblinear wants both classes.
    """
    both = np.concatenate([z, np.zeros((2, z.shape[1]))])
    labels = np.concatenate([signs, [1.0, -1.0]])
    machine = LinearSVC(
        C=cost, loss="hinge", dual=True, fit_intercept=False, tol=TOLERANCE, max_iter=STEPS, random_state=0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return np.asarray(machine.fit(both, labels).coef_[0], np.float64)
