"""The private support vector machine: hybrid and private SVM, in one release of the weights.

Reference: Li, Xiong, Ohno-Machado, Jiang, "Privacy Preserving RBF Kernel SVM", 2014, Algorithm 1, with C
divided by n (its Eq. 3 as printed is not: that is refuted) and without an intercept.
"""

from __future__ import annotations

import warnings
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import lsq_linear
from sklearn.exceptions import ConvergenceWarning
from sklearn.svm import LinearSVC

from fed_dp.accounting import Release
from fed_dp.clients.statistics import batches
from fed_dp.clients.trainer import Fit, Site, State
from fed_dp.errors import PrivacyError
from fed_dp.experiment import Svm
from fed_dp.experiment.release import amount
from fed_dp.mechanisms import Noise
from fed_dp.mechanisms.noise import Reals
from fed_dp.mechanisms.statistics import clipped
from fed_dp.mechanisms.support_vector import SvmNoise, gap, perturbed
from fed_dp.models import FlatNetwork, Vector
from fed_dp.models.fitted import KernelMachine
from fed_dp.sharing.update import LARGEST

Signs = NDArray[np.float64]
FIRST_TOLERANCE, LAST_TOLERANCE = 1e-6, 1e-14  # of liblinear
MOST_STEPS = 1_000_000  # of liblinear, through all records
MOST_EXACT = 4  # times as many records on the margin as there are features
NEAR = (1e-6, 1e-5, 1e-4, 1e-3)  # distances from the margin at which a record may count as on it


class SvmTrainer:
    """Solve ½‖w‖² + (C/n) Σ hinge on the site's records, add noise to w, once; then share that w.

    Guarantee: that of `support_vector.perturbed`; proved. Neighbours: replace one record. Several classes
    are one problem each, against the rest, and share the budget. The upload moves the model by `step` of
    the way to the site's own w: averaged, the model becomes the mean of the sites' by their counts.
    `as_printed`: C is not divided by n, as in Eq. 3; then the noise does not suffice.
    """

    def __init__(
        self,
        config: Svm,
        net: FlatNetwork,
        *,
        release: Release | None,
        kind: SvmNoise,
        step: float,
        as_printed: bool = False,
    ) -> None:
        assert isinstance(net.network, KernelMachine)  # by schema
        self._config, self._net, self._network = config, net, net.network
        self._amount = None if release is None else amount(release).value
        self._kind, self._step, self._as_printed = kind, step, as_printed
        self.spends = release is not None
        self._start = net.size - net.network.head.weight.numel()

    def stage(self, turn: int) -> int:
        """There is one stage."""
        return 1

    def frozen(self, weights: Vector, stage: int) -> Vector:
        """Return the frequencies."""
        return weights[: self._start]

    def release(self, weights: Vector, site: Site, stage: int, noise: Noise | None) -> Vector:
        """Return the site's w, with noise."""
        cost, records = self._config.cost, len(site.y)
        exactly = noise is not None and noise.name == "secure"
        own = self._solved(weights, site, cost if self._as_printed else cost / records, exactly=exactly)
        if self._amount is not None and noise is not None:
            own = perturbed(
                own,
                cost=cost,
                records=records,
                problems=len(own),
                kind=self._kind,
                amount=self._amount,
                noise=noise,
            )
        return np.clip(own.ravel(), -LARGEST, LARGEST).astype(np.float32)

    def follow(self, weights: Vector, released: Vector, stage: int, *, records: int) -> Fit:
        """Move towards the site's own w."""
        change = np.zeros_like(weights)
        change[self._start :] = np.clip(self._step * (released - weights[self._start :]), -LARGEST, LARGEST)
        return Fit(change)

    def fit(self, weights: Vector, site: Site, state: State) -> Fit:
        """Release without noise, and follow: for what is not private."""
        return self.follow(weights, self.release(weights, site, 1, None), 1, records=len(site.y))

    def _solved(self, weights: Vector, site: Site, cost: float, *, exactly: bool = False) -> Reals:
        """Return w of every problem: one of two classes, or one of each class against the rest."""
        self._net.load(weights)
        parts = batches(site, self._network.features, device=self._net.device, exactly=exactly)
        z = clipped(np.concatenate([rows for rows, _ in parts]))
        outputs = self._network.head.out_features
        signs = [np.where(site.y == k, 1.0, -1.0) for k in ([1] if outputs == 1 else range(outputs))]
        return np.stack([solve(z, each, cost=cost, gap=gap(cost)) for each in signs])


def solve(z: Reals, signs: Signs, *, cost: float, gap: float) -> Reals:
    """Return w within a duality gap of the minimum of ½‖w‖² + cost · Σ max(0, 1 − y wᵀz).

    liblinear (scikit-learn) solves, to ever finer tolerance until the gap is certified. Two records z = 0,
    one of each class, join: their loss is 1 whatever w is, and liblinear wants both classes.
    """
    both = np.concatenate([z, np.zeros((2, z.shape[1]))])
    labels = np.concatenate([signs, [1.0, -1.0]])
    tolerance = FIRST_TOLERANCE
    while tolerance >= LAST_TOLERANCE:
        machine = LinearSVC(
            C=cost,
            loss="hinge",
            dual=True,
            fit_intercept=False,
            tol=tolerance,
            max_iter=MOST_STEPS,
            random_state=0,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the gap tells
            w = np.asarray(machine.fit(both, labels).coef_[0], np.float64)
        if duality_gap(z, signs, w, cost=cost) <= gap:
            return w
        tolerance /= 100
    raise PrivacyError("the solver did not reach the agreed accuracy; nothing was sent")


def duality_gap(z: Reals, signs: Signs, w: Reals, *, cost: float) -> float:
    """Return an upper bound on how far w's objective is above the minimum.

    Any 0 ≤ α ≤ cost bounds the minimum from below by Σ α − ½‖Σ α y z‖². Here α is cost for records inside
    the margin, 0 outside, and, for those on it (equal ones together), whatever brings Σ α y z = v nearest to
    w. The gap is then ½‖w − v‖² + Σ (cost · max(s, 0) − α s) with s = 1 − y wᵀz: sums of what is never
    negative, and 0 but for records on the margin. (A difference of two objectives would lose its digits.)
    """
    rows = z * signs[:, None]
    slack = 1 - rows @ w
    close = np.flatnonzero(np.abs(slack) <= NEAR[-1])
    groups, first, sizes = np.unique(rows[close], axis=0, return_index=True, return_counts=True)
    apart = slack[close][first]
    inside = cost * rows[slack > 0].sum(0)
    least = np.inf
    for near in NEAR:
        free = np.abs(apart) <= near
        on, s, counts = groups[free], apart[free], sizes[free]
        fixed = inside - cost * (counts * (s > 0)) @ on
        share = np.zeros(0)
        if len(on):
            method: Literal["exact", "lsmr"] = (
                "exact" if len(on) <= MOST_EXACT * z.shape[1] else "lsmr"
            )  # which needs little memory
            bounds = (0, counts.astype(np.float64))
            found = lsq_linear(cost * on.T, w - fixed, bounds=bounds, tol=1e-14, lsq_solver=method)
            share = np.clip(found.x, 0, counts)
        away = w - fixed - cost * (share @ on)
        beside = cost * (counts * np.maximum(s, 0) - share * s).sum()
        least = min(least, 0.5 * float(away @ away) + float(beside))
    return float(least)
