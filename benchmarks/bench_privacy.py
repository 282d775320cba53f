"""sparse-vector/…, ledger/charge: what privacy adds to a client-round, apart from training itself.

The sparse vector on 140,106 changes (DSSGD's MLP), θ_u = .01, against one np.random laplace of the same
length, and against the paper's loop, one coordinate after the other; few changes reach the threshold, so
that all of them are asked. The charge is a virtual client's, with the ledger file's share, against
the training that it pays for.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import entries
import numpy as np
from bench_sharing import SIZE, alternate
from workload import bare_loop

from fed_dp.accounting import Account, Budget, Event, SampledGaussian
from fed_dp.accounting.ledger import write_accounts
from fed_dp.clients.ledger_session import TrainRequest, VirtualLedgerSession
from fed_dp.mechanisms import SimulationNoise, figure_12, sparse_vector
from fed_dp.sharing.selection import share

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.mechanisms import reference

COUNT = share(0.01, SIZE)
GAMMA, TAU, EPSILON = 1e-3, 1e-4, 1e3 * COUNT
CLIENTS, ROUNDS = 100, 15


def main() -> None:
    sparse_vectors()
    charges()


def sparse_vectors() -> None:
    rng = np.random.default_rng(0)
    change = rng.laplace(scale=TAU / 5, size=SIZE).astype(np.float32)
    noise = SimulationNoise(rng)
    options = {"bound": GAMMA, "threshold": TAU, "count": COUNT, "epsilon": EPSILON, "noise": noise}
    baseline, proved, paper = alternate(
        lambda: rng.laplace(size=SIZE),
        lambda: sparse_vector(change, **options),
        lambda: figure_12(change, **options),
    )
    values, times = change.tolist(), []
    for _ in range(5):
        began = time.perf_counter()
        found = reference.figure_12(values, gamma=GAMMA, tau=TAU, count=COUNT, epsilon=EPSILON, rng=rng)
        times.append(1e6 * (time.perf_counter() - began))
    loop = statistics.median(times)
    print(f"the loop: {loop / 1e3:.0f} ms, {len(found)} of at most {COUNT} uploaded", file=sys.stderr)
    for name, value, of_loop in (("proved", proved, 1 / 100), ("paper", paper, 1 / 80)):
        for entry, against, limit in ((name, baseline, 6), (f"{name}-to-loop", loop, of_loop)):
            entries.add(
                f"sparse-vector/{entry}",
                value=value,
                unit="µs",
                baseline=against,
                ratio=value / against,
                limit=limit,
            )


def charges() -> None:
    budget, release = Budget(8.0, 1e-5), SampledGaussian(1.2, 0.05, 20)
    states = [Account.open(f"client-{client:04d}", "digest", budget).to_json() for client in range(CLIENTS)]
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        for turn in range(1, ROUNDS + 1):
            new = {}
            for client in range(CLIENTS):
                books = VirtualLedgerSession(Account.from_json(states[client]))
                question = TrainRequest(turn, b"", None)
                books.kept(question)
                event = Event(release, "psgd", turn, client, "simulation")
                account = books.charge(event, question, ahead=ROUNDS)
                states[client] = account.to_json()
                new[account.site] = account, books.new
            write_accounts(Path(folder) / "ledgers.sqlite", new)
        each = (time.perf_counter() - began) / (CLIENTS * ROUNDS)
    entries.add_times("ledger/charge", each, baseline=bare_loop(1), limit=0.02)


if __name__ == "__main__":
    main()
