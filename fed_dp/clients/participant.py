"""A participant's side of the exchange (Fig. 3): what it makes of a download, and what it uploads."""

from __future__ import annotations

from dataclasses import dataclass

from fed_dp import seeds
from fed_dp.errors import RunError, UploadRefused
from fed_dp.experiment import Dssgd, Experiment
from fed_dp.models import Vector
from fed_dp.sharing.codec import Precision, decode, encode
from fed_dp.sharing.selection import Selector, share
from fed_dp.sharing.update import SparseUpdate


@dataclass(frozen=True, slots=True)
class Participant:
    """One client's share of the exchange; without a selector it exchanges everything."""

    size: int
    selector: Selector | None = None
    keeps_local: bool = False  # it downloads a part only, so its own parameters last from turn to turn
    precision: Precision = "float32"

    @classmethod
    def of(cls, experiment: Experiment, client: int, size: int) -> Participant:
        """Return what the experiment says about this client."""
        options = experiment.strategy
        if not isinstance(options, Dssgd):
            return cls(size)
        selector = Selector(
            share(options.upload_share(client), size), options.selection, options.threshold, options.bound
        )
        partly = share(options.download_share(client), size) < size
        return cls(size, selector, partly, options.precision)

    def download(self, data: bytes, local: Vector) -> Vector:
        """Replace the local parameters that were downloaded (step 1)."""
        try:
            update = decode(data, size=self.size, most=self.size)
        except UploadRefused as error:
            raise RunError(f"weights from the server: {error}") from None
        if update.indices is None:
            return update.values
        weights = local.copy()
        update.overwrite(weights)
        return weights

    def upload(self, change: Vector, *, seed: int, turn: int, client: int) -> bytes:
        """Select, truncate and encode the changes to upload (step 4)."""
        whole = SparseUpdate.dense(change)  # refuses NaN, which no comparison would select
        if self.selector is None:
            return encode(whole)
        rng = seeds.generator(seed, "selection", turn, client)
        return encode(self.selector.select(change, rng=rng), precision=self.precision)
