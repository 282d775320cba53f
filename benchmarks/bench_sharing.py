"""select-encode, decode-add, average, wire/…: the hot path between a trained client and the server's state.

140,106 parameters (DSSGD's MLP). Times are ratios to one np.argpartition of the same array; bytes
are ratios to the information bound, log2 C(n, k) bits for where and 32 for each value. For the
record, the other codings that were considered are printed beside ours.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import entries
import numpy as np

from fed_dp.sharing.codec import decode, encode, information_bound
from fed_dp.sharing.message import Upload
from fed_dp.sharing.parameter_server import ParameterServer
from fed_dp.sharing.selection import Selector, share
from fed_dp.sharing.update import Indices, SparseUpdate, Vector
from fed_dp.strategies.averaging.strategy import AveragingStrategy
from fed_dp.strategies.sites import Site

SIZE = 140_106
REPEATS = 300


def alternate(*works: Callable[[], Any]) -> list[float]:
    """Return the median microseconds of each, measured in turn."""
    seconds = entries.medians(*works, repeats=REPEATS, dropped=REPEATS // 10)
    return [1e6 * each for each in seconds]


def byte_gaps(indices: Indices) -> int:
    """Bytes of the gaps between indices, seven bits to a byte."""
    gaps = np.diff(indices, prepend=-1)
    return int(sum((gaps >= 1 << bits).sum() for bits in (0, 7, 14, 21)))


def main() -> None:
    rng = np.random.default_rng(0)
    change = rng.normal(size=SIZE).astype(np.float32)
    for fraction in (0.01, 0.1):
        count = share(fraction, SIZE)
        selector = Selector(count)
        update = selector.select(change, rng=rng)
        data, bound = encode(update), information_bound(SIZE, count)
        assert update.indices is not None
        others = {"byte gaps": byte_gaps(update.indices), "bitmap": SIZE / 8, "32-bit indices": 4 * count}
        told = ", ".join(f"{name} {(extra + 4 * count) / bound:.3f}" for name, extra in others.items())
        print(f"θ_u = {fraction}: ours {len(data) / bound:.3f}, {told}, dense {4 * SIZE / bound:.3f}")
        entries.add(
            f"wire/upload-{fraction}",
            value=len(data),
            unit="bytes",
            baseline=bound,
            ratio=len(data) / bound,
            limit=1.15,
        )
        if fraction == 0.01:
            times(change, selector, data)
    average(rng)


def average(rng: np.random.Generator) -> None:
    """Weigh and add 100 dense uploads, against the mean of the same by NumPy."""
    sites = [Site(node + 1, node, 600) for node in range(100)]
    vectors = rng.normal(size=(100, SIZE)).astype(np.float32)
    uploads: Any = [
        (Namespace(site=site), Upload(SparseUpdate.dense(vector), 600))
        for site, vector in zip(sites, vectors, strict=True)
    ]
    strategy = AveragingStrategy(np.zeros(SIZE, np.float32), sites)
    baseline, ours = entries.medians(
        lambda: vectors.mean(0, dtype=np.float64), lambda: strategy.combine(uploads), repeats=10, dropped=2
    )
    entries.add(
        "average",
        value=1e4 * ours,
        unit="µs an upload",
        baseline=1e4 * baseline,
        ratio=ours / baseline,
        limit=1.5,
    )


def times(change: Vector, selector: Selector, data: bytes) -> None:
    rng = np.random.default_rng(1)
    count = selector.count
    server = ParameterServer(np.zeros(SIZE, np.float32))
    baseline, ours, back = alternate(
        lambda: np.argpartition(change, SIZE - count),
        lambda: encode(selector.select(change, rng=rng)),
        lambda: server.upload(decode(data, size=SIZE, most=count)),
    )
    for name, value, limit in (("select-encode", ours, 2.5), ("decode-add", back, 1.0)):
        entries.add(name, value=value, unit="µs", baseline=baseline, ratio=value / baseline, limit=limit)


if __name__ == "__main__":
    main()
