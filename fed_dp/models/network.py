"""What a network declares: its options, what trainers find in it, and how it is built.

A network is a table `model` of an experiment. Its class is registered under the entry point `fed_dp.models`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fed_dp import plugins
from fed_dp.errors import ModelError
from fed_dp.options import Section
from fed_dp.tasks import Classification, Task

if TYPE_CHECKING:
    from torch import nn

Shape = tuple[int, ...]
# What a trainer can find in a network:
Capability = Literal[
    "gradients",  # log-probabilities, whose gradient by every record exists: no layer mixes records
    "encoder",  # `Encoded`: features of bounded norm that no record decides, or that released moments do
    "filters",  # `Encoded`: convolutions made of released moments of patches
    "relevance",  # `Encoded`: features weighed by their relevance to public records
    "kernel",  # `KernelMachine`: Fourier features of a kernel under a linear machine; or the kernel itself
    "auto-encoder",  # the objective of dPA's paper
    "energy",  # that of pCDBN's
    "noisy-inputs",  # that of AdLM's
    "logistic",  # linear log-probabilities, whose loss is convex
    "free-energy",  # that of a conditional restricted Boltzmann machine
]


class Network(Section):
    """Options of a network; subclasses add theirs. Sizes that are not given are the network's own."""

    name: str = ""
    offers: ClassVar[Capability] = "gradients"
    of_behaviour: ClassVar[bool] = False  # whether it needs records of behaviour, with past and friends
    fitted: ClassVar[bool] = False  # whether an encoder of it is fitted to public records
    holds_records: ClassVar[bool] = False  # whether its parameters are records: only for public ones
    closed_form: ClassVar[bool] = False  # whether its head follows from statistics without any descent

    @property
    def stages(self) -> int:
        """How many statistics its encoder and head are made of: one for each learnt layer, and the head's."""
        return 1

    @property
    def persons(self) -> int | None:
        """Of how many persons it has parameters of their own."""
        return None

    @property
    def sizes(self) -> dict[str, int]:
        """The whole numbers that are given: a site's own file limits them."""
        given = self.model_dump(exclude={"name"}, exclude_none=True)
        return {key: value for key, value in given.items() if type(value) is int}

    @abstractmethod
    def build(self, shape: Shape, classes: int, **decided: Any) -> nn.Module:
        """Build it for inputs of `shape`; `decided` is what a trainer decides of it."""

    def without_log_probabilities(self, network: nn.Module, task: Task) -> nn.Module:
        """Return the network with its last layer's own outputs, for tasks that take no classes."""
        from fed_dp.models.layers import without_log_softmax

        if (found := without_log_softmax(network, task)) is None:
            raise ModelError(
                f"model.name = {self.name!r} ends in probabilities of classes: expected with task.name = "
                "'classification' or 'binary'"
            )
        return found

    def own_module(self, network: nn.Module) -> nn.Module:
        """Return, of a network that it built, the part that users know as theirs."""
        return network

    def image(self, shape: Shape, *, at_least: int) -> tuple[int, int, int]:
        """Return the shape, which must be of images with sides of at least so many pixels."""
        if len(shape) != 3 or min(shape[1:]) < at_least:
            raise ModelError(
                f"model.name = {self.name!r} needs images of {at_least}×{at_least} or more; the data has "
                f"shape {shape}"
            )
        return shape[0], shape[1], shape[2]

    def exactly(self, shape: Shape, expected: Shape) -> None:
        """Refuse inputs of any other shape."""
        if shape != expected:
            raise ModelError(
                f"model.name = {self.name!r} needs inputs of shape {expected}; the data has shape {shape}"
            )


@dataclass(frozen=True, slots=True)
class NetworkSpec:
    """All that a network is built from: options, inputs, outputs, what a trainer decides of it; and its task.

    `classes` is the number of outputs: of classes, labels or numbers, as the task has it.
    """

    model: Network
    shape: Shape
    classes: int
    decided: Mapping[str, Any] = field(default_factory=dict)
    task: Task = field(default_factory=Classification)

    @classmethod
    def named(
        cls, name: str, shape: Shape, classes: int, decided: Mapping[str, Any] | None = None, **options: Any
    ) -> NetworkSpec:
        """Return what the network of a name is built from, with its own options."""
        return cls(plugins.read("model", {"name": name, **options}), shape, classes, decided or {})

    @property
    def name(self) -> str:
        """The network's name."""
        return self.model.name

    def build(self) -> nn.Module:
        """Build the network, with the outputs that its task takes."""
        self.task.check_outputs(self.classes)
        network = self.model.build(self.shape, self.classes, **self.decided)
        return (
            network
            if self.task.log_probabilities
            else self.model.without_log_probabilities(network, self.task)
        )


def size_of(shape: Shape) -> int:
    """Return how many numbers an input of a shape has."""
    return math.prod(shape)
