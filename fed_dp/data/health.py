"""A generated health social network of the shape of YesiWell's, which is not public.

As dPA and pCDBN describe theirs: 254 overweight or obese people, 30 attributes in three groups (behaviour,
inbox messages by kind, biomarkers), 1,383 friendships, 2,766 messages, 11,458 competitions joined,
300 days or 48 weeks; the label says whether a person exercises more at the next time point. It is
seeded and therefore the same everywhere; nothing in it comes from anybody.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fed_dp.data import behaviour
from fed_dp.data.behaviour import Reals
from fed_dp.data.dataset import DataSet, Floats, Records, divided

Test = Literal["latest", "random"]
Label = Literal["next", "now"]
PEOPLE, DAYS, WEEKS, FRIENDSHIPS, MESSAGES, COMPETITIONS = 254, 300, 48, 1383, 2766, 11_458
WINDOW = behaviour.WINDOW
SEED = 2_010_10

BEHAVIOUR = (
    "competitions joined", "exercising days", "goals set", "goals achieved", "distance", "speed",
)  # fmt: skip
KINDS = (
    "encouragement", "fitness", "followup", "competition", "games", "personal", "study protocol",
    "progress report", "technique", "social network", "meetups", "goal", "wellness meter", "feedback",
    "heckling", "explanation", "invitation", "notice", "technical fitness", "physical",
)  # fmt: skip
BIOMARKERS = ("wellness score", "bmi", "bmi slope", "wellness slope")
ATTRIBUTES = BEHAVIOUR + KINDS + BIOMARKERS
# Public bounds of each attribute: of a day (counts are of the last seven) and of a week.
BOUNDS = np.array(
    [(0, 7), (0, 7), (0, 3), (0, 3), (0, 12), (0, 8)]
    + [(0, 3)] * len(KINDS)
    + [(0, 100), (20, 50), (-0.5, 0.5), (-5, 5)],
    np.float64,
)


@dataclass(frozen=True, slots=True)
class Network:
    """Who is friends with whom, and what happened: (people, time points, attributes), and influence.

    `influence` is (1/|F_u|) Σ_{v ∈ F_u} ψ_t(v, u), ψ being the probability that v moves u at time t.
    """

    friends: NDArray[np.bool_]
    attributes: Reals
    influence: Reals
    exercise: Reals  # what the label compares
    messages: int
    competitions: int


def generate(*, weekly: bool) -> Network:
    """Simulate the study day by day; weeks are summed up from days."""
    rng = np.random.default_rng(SEED)
    days = 7 * WEEKS
    fitness = rng.normal(size=PEOPLE)
    friends = _friendships(fitness, rng)
    sent = _messages(friends, days, rng)  # day, from, to, kind
    joined = _spread_out(COMPETITIONS, np.exp(0.6 * fitness), days, rng)
    encouraged = np.zeros((days, PEOPLE))
    kinds = np.zeros((days, PEOPLE, len(KINDS)))
    warmth = np.zeros((days, PEOPLE, PEOPLE))  # from, to: messages of the last week
    for day, sender, receiver, kind in sent:
        kinds[day, receiver, kind] += 1
        encouraged[day, receiver] += kind in (0, 3, 11)  # encouragement, competition, goal
        warmth[day : day + 7, sender, receiver] += 1
    # Enthusiasm comes from outside, for a week and for a day; friends feel it a day and a week later.
    keen = 0.7 * np.repeat(rng.normal(size=(WEEKS, PEOPLE)), 7, axis=0) + 0.7 * rng.normal(
        size=(days, PEOPLE)
    )
    psi = 1 / (1 + np.exp(-(2.0 * keen[:, :, None] + 0.8 * warmth)))  # day, from, to
    influence = np.stack(
        [behaviour.influence(psi[:, friends[:, u], u].T.copy()) for u in range(PEOPLE)], axis=1
    )
    of_week = np.repeat(_by_week(influence), 7, axis=0)
    push = np.zeros((days, PEOPLE))
    push[1:] += 12.0 * (influence[:-1] - 0.5) + 0.8 * encouraged[:-1]
    push[7:] += 12.0 * (of_week[:-7] - 0.5)
    weekend = np.where(np.arange(days) % 7 >= 5, 0.5, 0.0)[:, None]
    noise = rng.normal(scale=0.6, size=(days, PEOPLE))
    walked = np.clip(_usual(fitness) + 0.3 * keen + push + 0.5 * joined + weekend + noise, 0, 12)
    attributes = _attributes(walked, joined, kinds, fitness, rng)
    exercise = walked
    if weekly:
        attributes, influence, exercise = (
            _by_week(attributes, last=True),
            _by_week(influence),
            _by_week(walked),
        )
        counts = _by_week(kinds) * 7
        attributes[:, :, len(BEHAVIOUR) : len(BEHAVIOUR) + len(KINDS)] = counts
        attributes[:, :, 4] = exercise
    else:
        attributes, influence, exercise = (a[:DAYS] for a in (attributes, influence, walked))
    return Network(
        friends,
        attributes.swapaxes(0, 1),
        influence.T.copy(),
        exercise.T.copy(),
        len(sent),
        int(joined.sum()),
    )


def _friendships(fitness: Reals, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Draw friendships: like meets like, and some people meet many."""
    popular = rng.gamma(1.5, size=PEOPLE)
    first, second = np.triu_indices(PEOPLE, 1)
    weight = popular[first] * popular[second] * np.exp(-np.abs(fitness[first] - fitness[second]))
    chosen = rng.choice(len(first), FRIENDSHIPS, replace=False, p=weight / weight.sum())
    friends = np.zeros((PEOPLE, PEOPLE), bool)
    friends[first[chosen], second[chosen]] = True
    return friends | friends.T


def _messages(friends: NDArray[np.bool_], days: int, rng: np.random.Generator) -> NDArray[np.int64]:
    senders, receivers = np.nonzero(friends)
    pair = rng.integers(len(senders), size=MESSAGES)
    common = 1 / (1 + np.arange(len(KINDS)))
    kind = rng.choice(len(KINDS), MESSAGES, p=common / common.sum())
    return np.stack([rng.integers(days, size=MESSAGES), senders[pair], receivers[pair], kind], axis=1)


def _spread_out(count: int, weight: Reals, days: int, rng: np.random.Generator) -> Reals:
    """Return how often each person did something on each day, `count` times in all."""
    who = rng.choice(PEOPLE, count, p=weight / weight.sum())
    happened = np.zeros((days, PEOPLE))
    np.add.at(happened, (rng.integers(days, size=count), who), 1)
    return happened


def _usual(fitness: Reals) -> Reals:
    """Return how far people walk when nothing moves them."""
    return 4.0 + 0.8 * fitness


def _attributes(
    walked: Reals, joined: Reals, kinds: Reals, fitness: Reals, rng: np.random.Generator
) -> Reals:
    days = len(walked)
    recent = np.stack([walked[max(0, day - 6) : day + 1].mean(0) for day in range(days)])
    week = [slice(max(0, day - 6), day + 1) for day in range(days)]
    goals = rng.binomial(3, 0.3, size=walked.shape) * (np.arange(days) % 7 == 0)[:, None]
    achieved = np.minimum(goals, rng.binomial(3, np.clip(recent / 8, 0, 1)))
    bmi = 31 + 3 * rng.normal(size=PEOPLE) - 1.5 * fitness - 0.3 * np.cumsum(recent - _usual(fitness), 0) / 30
    wellness = np.clip(100 - 3 * (bmi - 22) + 5 * (recent - 3), 0, 100)
    columns = [
        np.stack([joined[w].sum(0) for w in week]),
        np.stack([(walked[w] > 2.5).sum(0) for w in week]),
        np.stack([goals[w].max(0) for w in week]),
        np.stack([achieved[w].max(0) for w in week]),
        walked,
        np.clip(3.5 + 0.5 * fitness + rng.normal(scale=0.3, size=walked.shape), 0, 8),
    ]
    columns += [np.stack([kinds[w, :, k].sum(0) for w in week]) for k in range(len(KINDS))]
    columns += [wellness, bmi, *(np.diff(a, axis=0, prepend=a[:1]) for a in (bmi, wellness))]
    return np.stack(columns, axis=2)


def _by_week(values: Reals, *, last: bool = False) -> Reals:
    """Return means of weeks, or each week's last day."""
    weeks = values.reshape(WEEKS, 7, *values.shape[1:])
    return np.asarray(weeks[:, -1] if last else weeks.mean(1)).copy()


def windows(
    attributes: Reals, influence: Reals, exercise: Reals, bounds: Reals
) -> Iterator[tuple[Floats, NDArray[np.int64], NDArray[np.int64]]]:
    """Yield of each person all records, labels and time points. Label: more exercise at the next one."""
    low, high = bounds.T
    scaled = (2 * (np.clip(attributes, low, high) - low) / (high - low) - 1).astype(np.float32)
    for own, moved, done in zip(scaled, influence, exercise, strict=True):
        rows, labels, whole = behaviour.windows(own, moved, done, WINDOW)
        yield rows[whole], labels[whole], np.flatnonzero(whole)


NOTES = behaviour.notes()


def most_points(*, weekly: bool, test: Test) -> int:
    """Return how many time points there are for training (`latest`), or for all records (`random`)."""
    length = WEEKS if weekly else DAYS
    return math.ceil(0.8 * (length - 1)) if test == "latest" else length - WINDOW


def health_network(
    *, weekly: bool, points: int | None = None, test: Test = "latest", label: Label = "next"
) -> DataSet:
    """Return the records of everybody.

    Parameters
    ----------
    weekly
        Weeks in place of days.
    points
        M: train on the last M consecutive time points before the test records, hence on M − WINDOW + 1
        records of each person; with random test records, use the last M time points' records alone.
        None: all.
    test
        `latest`: the last fifth of the time is the test set. `random`: a random tenth of all records is.
    label
        Whether a person exercises more at the `next` time point than now, or `now` than before.
    """
    network = generate(weekly=weekly)
    parts = list(windows(network.attributes, network.influence, network.exercise, BOUNDS))
    x, y, now = (np.concatenate([part[i] for part in parts]) for i in range(3))
    person = np.repeat(np.arange(PEOPLE), [len(labels) for _, labels, _ in parts])
    owner = np.array([f"{number:03d}" for number in range(PEOPLE)])[person]
    if label == "now":
        y = (network.exercise[person, now] > network.exercise[person, now - 1]).astype(np.int64)
    last = int(now.max())
    notes: tuple[str, ...] = ("generated: a health social network of the shape of YesiWell's", *NOTES)
    if test == "latest":
        tested = now >= 0.8 * (last + 1)
        kept = tested | (now >= int(now[~tested].max()) - (points or len(now)) + WINDOW)
    else:
        kept = now > last - (points or len(now))
        tested = np.zeros(len(now), bool)
        chosen = np.flatnonzero(kept)
        tested[np.random.default_rng(SEED).permutation(chosen)[: round(len(chosen) / 10)]] = True
        notes += ("a random tenth is for tests: other records of the same people and days train",)
    if points is not None:
        notes += (f"{points} consecutive time points are used",)
    name = "health-weekly" if weekly else "health-daily"
    return divided(name, Records(x[kept], y[kept], owner[kept]), tested[kept], classes=2, notes=notes)


def without_influence(data: DataSet) -> DataSet:
    """Return the same records with friends left out."""

    def alone(records: Records) -> Records:
        x = records.x.copy()
        x[:, :, WINDOW] = 0
        return Records(x, records.y, records.owner)

    notes = (*data.notes, "the influence of friends is left out")
    return replace(data, train=alone(data.train), test=alone(data.test), notes=notes)
