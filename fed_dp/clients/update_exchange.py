"""A client's side of the exchange (Fig. 3): what it makes of a download, and what it uploads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fed_dp import seeds
from fed_dp.accounting import Release
from fed_dp.errors import RunError, UploadRefused
from fed_dp.experiment import Experiment
from fed_dp.mechanisms import Noise
from fed_dp.models import Vector
from fed_dp.sharing.codec import Precision, decode, encode
from fed_dp.sharing.private_selection import RandomMask, SparseVectorSelector
from fed_dp.sharing.selection import Selector, share
from fed_dp.sharing.update import SparseUpdate


@dataclass(frozen=True, slots=True)
class UpdateExchange:
    """One client's share of the exchange; without a selector it exchanges everything."""

    size: int
    selector: Selector | SparseVectorSelector | RandomMask | None = None
    keeps_local: bool = False  # it downloads a part only, so its own parameters last from round to round
    precision: Precision = "float32"

    @classmethod
    def of(cls, experiment: Experiment, client: int, size: int, release: Release | None) -> UpdateExchange:
        """Return what the experiment says about this client, whose round releases `release`."""
        strategy = experiment.strategy
        partly = share(strategy.download_share(client), size) < size
        selector = strategy.selector(experiment, client=client, size=size, release=release)
        return cls(size, selector, partly, strategy.upload_precision)

    def download(self, data: bytes, local: Callable[[], Vector]) -> Vector:
        """Replace the local parameters that were downloaded (step 1); all of them, or a part."""
        try:
            update = decode(data, size=self.size, most=self.size)
        except UploadRefused as error:
            raise RunError(f"weights from the server: {error}") from None
        if update.indices is None:
            return update.values
        weights = local().copy()
        update.overwrite(weights)
        return weights

    def upload(
        self, change: Vector, *, seed: int, server_round: int, client: int, noise: Noise | None
    ) -> bytes:
        """Select, truncate and encode the changes to upload (step 4); with noise, if selection is private."""
        selector = self.selector
        if isinstance(selector, SparseVectorSelector | RandomMask):
            assert noise is not None  # a private selector comes with a plan, and that with noise
            return encode(selector.select(change, noise=noise), precision=self.precision)
        whole = SparseUpdate.dense(change)  # refuses NaN, which no comparison would select
        if selector is None:
            return encode(whole)
        rng = seeds.generator(seed, "selection", server_round, client)
        return encode(selector.select(change, rng=rng), precision=self.precision)
