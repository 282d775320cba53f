"""What the mods of a ClientApp have in common: the download as the app knows it, and the change it made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict

from fed_dp.errors import RunError
from fed_dp.flower.arrays import PARTLY, TERMS, Layout, the_arrays, update_in
from fed_dp.sharing.codec import Precision, decode
from fed_dp.sharing.update import Vector

TRAIN, EVALUATE = MessageType.TRAIN, MessageType.EVALUATE
App = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, App], Message]
OWN, TEMPLATE = "fed_dp.own", "fed_dp.template"  # in a node's state: its own parameters, the model's arrays


@dataclass(frozen=True, slots=True)
class Download:
    """What a site was sent: the model as a vector, and what the strategy asks of the upload."""

    name: str  # of the record of arrays
    layout: Layout
    template: ArrayRecord
    weights: Vector
    terms: ConfigRecord | None  # of `Dssgd`; None: another strategy, which takes whole arrays
    keeps_own: bool  # whether it downloads a part only, so that its own parameters last

    @classmethod
    def of(cls, message: Message, context: Context) -> Download:
        """Read a message that trains.

        Raises
        ------
        RunError
            When it holds no model, or a part of one and this node has lost the rest.
        """
        content = message.content
        name, record = the_arrays(content, of="the server's message")
        terms = content.config_records.get(TERMS)
        data = update_in(record)
        if data is not None and terms is None:  # what this node keeps must not be answered with whole arrays
            raise RunError("the server's message holds a part of a model and no terms of fed_dp.flower.Dssgd")
        if data is None:
            layout = Layout.of(record)
            weights = layout.flatten(record, of="the server's message")
            return cls(name, layout, record, weights, terms, bool(terms and terms.get(PARTLY)))
        template, own = context.state.get(TEMPLATE), context.state.get(OWN)
        if not isinstance(template, ArrayRecord) or not isinstance(own, ArrayRecord):
            raise RunError("this node has no parameters of its own to add a part of the model to")
        layout, weights = Layout.of(template), own[OWN].numpy().copy()
        decode(data, size=layout.size, most=layout.size).overwrite(weights)
        return cls(name, layout, template, weights, terms, True)

    def train(self, app: App, message: Message, context: Context) -> Message:
        """Let the app train, from a message with the whole model, as it would come from any strategy."""
        records = {key: value for key, value in message.content.items() if key != TERMS}
        message.content = RecordDict({**records, self.name: self.layout.fill(self.template, self.weights)})
        return app(message, context)

    def trained(self, reply: Message) -> tuple[str, Vector]:
        """Return the model that the app replied with, and the name of its record."""
        name, record = the_arrays(reply.content, of="the app's reply")
        return name, self.layout.flatten(record, of="the app's reply")

    def keep_own(self, context: Context, weights: Vector) -> None:
        """Keep the node's own parameters, all that it has learnt, for the next partial download."""
        if self.keeps_own:
            context.state[TEMPLATE] = self.template
            context.state[OWN] = ArrayRecord({OWN: Array(np.ascontiguousarray(weights))})


def precision_of(terms: Mapping[str, Any]) -> Precision:
    """Return how the strategy wants uploaded values written."""
    known: tuple[Precision, ...] = get_args(Precision)
    asked = terms.get("precision", "float32")
    if (found := next((each for each in known if each == asked), None)) is None:
        raise RunError(f"precision = {asked!r} from the server: expected {' or '.join(known)}")
    return found


def category(message: Message) -> str:
    """Return what a message asks for: Flower takes "train.anything" for training, too."""
    return message.metadata.message_type.partition(".")[0]
