"""Sections of an experiment: frozen tables that refuse unknown keys and wrong types; types of keys."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

Fraction = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=1, le=10_000)]  # of a layer
Words = Annotated[tuple[str, ...], Field(strict=False)]


class Section(BaseModel):
    """A frozen part of an experiment that refuses unknown keys and wrong types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    later_keys: ClassVar[tuple[str, ...]] = ()  # not in the digest at their default, as before they existed

    def is_set(self, key: str) -> bool:
        """Return whether there is such a key, and it differs from its default."""
        field = type(self).model_fields.get(key)
        return field is not None and bool(getattr(self, key) != field.default)


def _number_or_list(value: Any) -> str:
    return "list" if isinstance(value, list | tuple) else "number"


Counts = Annotated[
    Annotated[Count, Tag("number")] | Annotated[tuple[Count, ...], Field(strict=False), Tag("list")],
    Discriminator(_number_or_list),
]
Fractions = Annotated[
    Annotated[Fraction, Tag("number")] | Annotated[tuple[Fraction, ...], Field(strict=False), Tag("list")],
    Discriminator(_number_or_list),
]
Number = TypeVar("Number", int, float)


def of_client(numbers: Number | tuple[Number, ...], client: int) -> Number:
    """Return a client's number: all clients have the same, or each has its own."""
    return numbers[client] if isinstance(numbers, tuple) else numbers
