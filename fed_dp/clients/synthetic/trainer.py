"""Train on synthetic records: the middles of a noisy histogram's cells, each as often as it was counted."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fed_dp.accounting import Release
from fed_dp.clients.synthetic import Synthetic
from fed_dp.clients.trainer import ClientData, Fit, State
from fed_dp.errors import ConfigError
from fed_dp.experiment.plan import noise_spec
from fed_dp.mechanisms import Noise
from fed_dp.mechanisms.histogram import LISTED, Grid
from fed_dp.mechanisms.noise import Integers, Reals
from fed_dp.models import FlatNetwork, Vector
from fed_dp.sharing.update import MAX_ABS_VALUE


class SyntheticTrainer:
    """Release a histogram once; then minimise (1/n) Σ count · loss(middle, label) + decay/2 ‖w‖².

    Guarantee: that of the histogram, which the options name; proved. Neighbours: zero out one record of a
    site whose number of records n is public; or add or remove one, where n is a declared number. Negative
    counts are 0 here. Inputs that span no cells are 0, the middle of their bounds. The upload moves the
    model by `step` of the way.
    """

    def __init__(
        self, config: Synthetic, net: FlatNetwork, *, release: Release | None, secure: bool, step: float
    ) -> None:
        self._config, self._net, self._secure, self._step = config, net, secure, step
        inputs = math.prod(net.shape)
        self._places = np.array(range(inputs) if config.attributes is None else config.attributes)
        if self._places.max() >= inputs:
            raise ConfigError(
                f"trainer.attributes names {self._places.max()}: records have {inputs} numbers; expected "
                f"0..{inputs - 1}"
            )
        self._grid(3)  # refuses too many cells before anything is charged
        self._epsilon = None if release is None else noise_spec(release).value
        self.is_private = release is not None

    def stage(self, server_round: int) -> int:
        """There is one stage."""
        return 1

    def frozen(self, weights: Vector, stage: int) -> Vector:
        """Return nothing: no weight decides the cells."""
        return weights[:0]

    def release(self, weights: Vector, data: ClientData, stage: int, noise: Noise | None) -> Vector:
        """Return the histogram, with noise."""
        expected = data.expected_records
        grid = self._grid(expected)
        cells = grid.cells_of(data.x.reshape(len(data.y), -1)[:, self._places], data.y)
        if self._epsilon is None or noise is None:
            found: tuple[Integers, Reals] | Reals = _counted(cells)
        else:
            found = self._config.released(cells, grid, expected=expected, epsilon=self._epsilon, noise=noise)
        return self._written(grid, found)

    def follow(self, weights: Vector, released: Vector, stage: int, *, records: int) -> Fit:
        """Fit synthetic records, from 0: the weights that came do not matter. Move towards that."""
        net, grid = self._net, self._grid(records)
        cells, counts = self._read(grid, released)
        net.load(np.zeros_like(weights))
        if len(cells):
            self._descend(*self._synthetic(grid, cells), torch.from_numpy(counts / records).to(net.device))
        change = self._step * (net.weights() - weights)
        return Fit(np.clip(np.nan_to_num(change), -MAX_ABS_VALUE, MAX_ABS_VALUE).astype(np.float32))

    def fit(self, weights: Vector, data: ClientData, state: State) -> Fit:
        """Count without noise, and train: for what is not private."""
        released = self.release(weights, data, 1, None)
        return self.follow(weights, released, 1, records=data.expected_records)

    def _grid(self, records: int) -> Grid:
        classes = self._net.spec.classes
        return self._config.grid(
            attributes=len(self._places), classes=classes, records=records, secure=self._secure
        )

    def _synthetic(self, grid: Grid, cells: Integers) -> tuple[Tensor, Tensor]:
        """Return the middles of cells as inputs, and their labels."""
        middles, labels = grid.centres(cells)
        x = np.zeros((len(cells), math.prod(self._net.shape)), np.float32)
        x[:, self._places] = middles
        return self._net.inputs(x.reshape(-1, *self._net.shape)), self._net.targets(labels)

    def _descend(self, x: Tensor, y: Tensor, counts: Tensor) -> None:
        net, config = self._net, self._config
        optimizer = torch.optim.LBFGS(
            net.parameters, max_iter=config.local_steps, history_size=20, line_search_fn="strong_wolfe"
        )

        def objective() -> Tensor:
            optimizer.zero_grad()
            total = (net.task.loss(net.trained(x), y) * counts).sum()
            total = (
                total
                + config.weight_decay / 2 * torch.stack([p.square().sum() for p in net.parameters]).sum()
            )
            total.backward()  # type: ignore[no-untyped-call]
            return total

        net.trained.eval()
        optimizer.step(objective)  # type: ignore[no-untyped-call]
        net.clamp(MAX_ABS_VALUE)

    def _dense(self, grid: Grid) -> bool:
        return self._config.lists_all or grid.cells <= LISTED

    def _written(self, grid: Grid, found: tuple[Integers, Reals] | Reals) -> Vector:
        """Return counts as one vector: of all cells in order or, where they are many, of some with places.

        Then each is a row: the interval of every attribute, the label, the count.
        """
        if not isinstance(found, tuple):
            return found.astype(np.float32)
        cells, counts = found
        if self._dense(grid):
            whole = np.zeros(grid.cells, np.float32)
            whole[cells] = counts
            return whole
        middles, labels = grid.centres(cells)
        digits = np.rint(((middles + 1) * grid.bins - 1) / 2)
        return np.column_stack([digits, labels, counts]).astype(np.float32).ravel()

    def _read(self, grid: Grid, released: Vector) -> tuple[Integers, Vector]:
        """Return the cells whose counts are above 0, and these."""
        if self._dense(grid):
            cells, counts = np.arange(grid.cells), released
        else:
            rows = released.reshape(-1, grid.attributes + 2)
            cells, counts = rows[:, -2].astype(np.int64), rows[:, -1]
            for column in rows[:, :-2].T:
                cells = cells * grid.bins + column.astype(np.int64)
        there = counts > 0
        return cells[there], np.ascontiguousarray(counts[there])


def _counted(cells: Integers) -> tuple[Integers, Reals]:
    found, counts = np.unique(cells, return_counts=True)
    return found, counts.astype(np.float64)
