"""A pre-trained encoder from a file, frozen, under a head that is trained.

Its weights never travel: every site has the file, which is pinned by its SHA-256. Nothing is proved about the
records that it was trained on: they must not be those of the sites.
"""

from __future__ import annotations

import hashlib
import io
import warnings
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from fed_dp import plugins
from fed_dp.errors import ConfigError, ModelError
from fed_dp.models.network import Network, Shape

if TYPE_CHECKING:
    from torch import nn

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_PROVIDED: dict[str, Path] = {}  # by SHA-256: files that a site's own file names


def provide(path: Path) -> str:
    """Offer a file to experiments that name its SHA-256, wherever it lies; return that."""
    sha256 = hashlib.sha256(_read(str(path))).hexdigest()
    _PROVIDED[sha256] = path
    return sha256


class Pretrained(Network):
    """What both have in common: a TorchScript file, or a state_dict of the module that `factory` returns."""

    weights: Annotated[str, Field(min_length=1)]  # the file
    sha256: Sha256 | None = None  # of the file; that of the file at hand, unless it is given
    factory: Annotated[str, Field(min_length=1)] | None = None  # package.module:name
    options: dict[str, Any] = Field(default_factory=dict)  # of the factory
    code: str | None = None  # SHA-256 of the factory's code; that of the code at hand, unless it is given

    @model_validator(mode="before")
    @classmethod
    def _pinned(cls, table: Any) -> Any:
        """Note what the file and the code are; refuse others than were noted."""
        if not isinstance(table, dict) or not isinstance(path := table.get("weights"), str):
            return table
        table = dict(table)
        try:
            if isinstance(factory := table.get("factory"), str):
                table["code"] = plugins.same_code(factory, table.get("code"), key="model")
            if table.get("sha256") is None:
                table["weights"] = str(Path(path).expanduser().absolute())  # workers run in other folders
                table["sha256"] = hashlib.sha256(_read(table["weights"])).hexdigest()
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return table

    def encoder(self, shape: Shape) -> tuple[nn.Module, int]:
        """Return the frozen encoder, and how many features it has for inputs of `shape`.

        Raises
        ------
        ModelError
            When the file is another than was noted, is no encoder, or does not take such inputs.
        """
        import torch

        from fed_dp.models.layers import Frozen

        assert self.sha256 is not None  # by _pinned
        frozen = Frozen(_loaded(self.weights, self.sha256, self.factory, repr(sorted(self.options.items()))))
        try:
            found = frozen(torch.zeros(2, *shape))
        except Exception as error:
            raise ModelError(
                f"model.weights = {self.weights!r} does not take inputs of shape {shape}: "
                f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error) else ''}"
            ) from error
        if not isinstance(found, torch.Tensor) or found.dim() < 2 or len(found) != 2:
            told = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise ModelError(
                f"model.weights = {self.weights!r} returned {told} for 2 records: expected a row of features "
                "for each"
            )
        return frozen, found[0].numel()


class FrozenEncoder(Pretrained):
    """Pre-trained features under statistics: released once, for dpa."""

    name: Literal["frozen-encoder"] = "frozen-encoder"
    offers = "encoder"

    def build(self, shape: Shape, classes: int, **decided: Any) -> nn.Module:
        """Build it."""
        from fed_dp.models.encoders import Encoded

        frozen, features = self.encoder(shape)
        return Encoded([frozen], features, classes)


class FrozenLinear(Pretrained):
    """Pre-trained features of norm 1 under a trainable linear layer, for gradient methods."""

    name: Literal["frozen-linear"] = "frozen-linear"

    def build(self, shape: Shape, classes: int, **decided: Any) -> nn.Module:
        """Build it."""
        from torch import nn

        from fed_dp.models.layers import OnFrozen, Unit

        frozen, features = self.encoder(shape)
        trained = nn.Sequential(nn.Linear(features, classes), nn.LogSoftmax(dim=1))
        return OnFrozen(nn.Sequential(frozen, nn.Flatten(), Unit()), trained)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"model.weights = {path!r} cannot be read: {error.strerror}") from None


@lru_cache(maxsize=4)
def _loaded(path: str, sha256: str, factory: str | None, options: str) -> nn.Module:
    """Load an encoder once per process."""
    import ast

    import torch
    from torch import nn

    data = _read(str(_PROVIDED.get(sha256, path)))
    where = f"model.weights = {path!r}"
    if (found := hashlib.sha256(data).hexdigest()) != sha256:
        raise ModelError(f"{where} has the SHA-256 {found}, the experiment says {sha256}")
    try:
        if factory is None:
            with warnings.catch_warnings():  # torch advises others to export in another way
                warnings.simplefilter("ignore", DeprecationWarning)
                return torch.jit.load(io.BytesIO(data), map_location="cpu")  # type: ignore[no-any-return, no-untyped-call]
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        made = plugins.imported(factory, key="model.factory")(**dict(ast.literal_eval(options)))
        if not isinstance(made, nn.Module):
            raise ModelError(
                f"model.factory = {factory!r} returned {type(made).__name__}: expected nn.Module"
            )
        made.load_state_dict(state)
    except ModelError:
        raise
    except Exception as error:
        kind = "a TorchScript file" if factory is None else f"a state_dict of {factory}"
        if factory is None and not zipfile.is_zipfile(io.BytesIO(data)):
            kind += " (a state_dict needs model.factory)"
        why = str(error).strip().splitlines()
        raise ModelError(f"{where} is not {kind}: {why[0] if why else type(error).__name__}") from error
    return made
