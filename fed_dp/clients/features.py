"""What the trained part of a network sees of each client's records: computed once, and kept.

Where a network has a frozen part, a round of one step would otherwise spend its time there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fed_dp.clients.trainer import ClientData
from fed_dp.data.dataset import Floats
from fed_dp.kept import Kept
from fed_dp.models import FlatNetwork, Vector
from fed_dp.models.augmentation import Views
from fed_dp.models.streams import torch_generator

MAX_BYTES = 4_000_000_000  # that a process keeps


@dataclass(frozen=True, slots=True)
class _Features:
    records: Floats  # the very array that they were computed from
    frozen: bytes
    inputs: Tensor


class FeatureCache:
    """Inputs of a network's trained part, by client."""

    def __init__(self, net: FlatNetwork, views: Views) -> None:
        self._net, self._views = net, views
        self._kept: Kept[_Features] = Kept(MAX_BYTES)

    def inputs(self, weights: Vector, data: ClientData, *, one_by_one: bool = False) -> Tensor:
        """Return what the trained part sees of a client's records under some weights.

        Of each record's views, where there are several: these are drawn once for each client. With
        `one_by_one`, how a record's features are rounded does not depend on the others.
        """
        net = self._net
        if net.trained is net.network:  # nothing is frozen
            return net.inputs(data.x)
        frozen = np.ascontiguousarray(weights[: net.trained_part.start]).tobytes()
        kept = self._kept.get(data.client)
        if kept is None or kept.records is not data.x or kept.frozen != frozen:
            net.load(weights)
            if self._views.count > 1:
                inputs = self._of_views(data)
            elif one_by_one:
                rows = [net.inputs(data.x[row : row + 1]) for row in range(len(data.y))]
                inputs = torch.cat(rows) if rows else net.inputs(data.x)
            else:
                inputs = net.inputs(data.x)
            kept = _Features(data.x, frozen, inputs)
            self._kept.put(data.client, kept, inputs.nbytes)
        return kept.inputs

    def _of_views(self, data: ClientData) -> Tensor:
        source = torch_generator(data.seed, "psgd views", data.client)
        views = self._views.of(torch.from_numpy(data.x), source)
        return torch.stack([self._net.inputs(view.numpy()) for view in views.unbind(1)], 1)
