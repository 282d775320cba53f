"""Who goes when (§5.5): the order of one round, as data.

A round is a sequence of waves. Sites of one wave download the same state; the next wave sees what
the one before has uploaded. A site that is `outdated` downloads the state of the previous round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fed_dp.seeds import Generator

Exchange = Literal["parallel", "round_robin", "random_order", "asynchronous", "free_running"]
ONE_AT_A_TIME = ("round_robin", "random_order", "asynchronous")  # one client trains at a time


@dataclass(frozen=True, slots=True)
class Order:
    """One round: waves of clients, and which of them download the previous round's state."""

    waves: tuple[tuple[int, ...], ...]
    outdated: frozenset[int] = frozenset()


def order(exchange: Exchange, clients: Sequence[int], *, rng: Generator, outdated: float = 0.0) -> Order:
    """Return one round's order of the given clients.

    parallel      all at once, as Flower does by default
    round_robin   one after the other, in fixed order
    random_order  one after the other, in an order drawn anew each round
    asynchronous  as the paper simulates it: random order, and each site downloads the previous
                  round's state with probability `outdated`

    `free_running` has no order: there, nobody waits for anybody.
    """
    if exchange == "free_running":
        raise ValueError("free_running has no order")
    if exchange == "parallel":
        return Order((tuple(clients),))
    if exchange == "round_robin":
        return Order(tuple((client,) for client in clients))
    shuffled = [clients[i] for i in rng.permutation(len(clients))]
    late = rng.random(len(shuffled)) < (outdated if exchange == "asynchronous" else 0)
    return Order(
        tuple((client,) for client in shuffled),
        frozenset(client for client, is_late in zip(shuffled, late, strict=True) if is_late),
    )
