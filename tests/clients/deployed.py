"""A real site for tests: a ClientApp whose own config names a ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict

from fed_dp.clients import app as client_app
from fed_dp.clients import workplace
from fed_dp.experiment import Experiment, to_run_config
from fed_dp.experiment.start import starting_weights
from fed_dp.sharing import message as names
from fed_dp.sharing.update import SparseUpdate
from fed_dp.simulations.grid import RUN_ID, identify
from fed_dp.strategies.site_strategy import record


class Deployed:
    """Each answer is that of a SuperNode that has just started: it knows its own config alone."""

    def __init__(self, experiment: Experiment, path: Path | None) -> None:
        identify()
        self.experiment = experiment
        self.config = dict(to_run_config(experiment))
        self.node: dict[str, Any] = {names.PARTITION: 0}
        if path is not None:
            self.node[names.LEDGER] = str(path)

    def answer(self, turn: int = 1, *, fill: float = 0.0, known: str = "", part: bool = False) -> Message:
        """Train from the first weights, plus `fill`, or from a part; `known` is the mark last seen."""
        place = workplace.workplace_of(Context(RUN_ID, 1, self.node, RecordDict(), self.config))[0]
        config = ConfigRecord({names.ROUND: turn, names.LEDGER_HEAD: known})
        weights = starting_weights(place.experiment, place.federation) + np.float32(fill)
        download = SparseUpdate(np.arange(2), weights[:2], weights.size) if part else weights
        content = RecordDict({names.ARRAYS: record(download), names.CONFIG: config})
        message = Message(content, 1, MessageType.TRAIN, group_id="1")
        return client_app.app(message, Context(RUN_ID, 1, self.node, RecordDict(), self.config))
