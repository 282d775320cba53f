"""Guarantees: what is promised about a release, to whom, and whether it is proved.

proved    there is a proof, and the code is held to its conditions
claimed   a paper says so; its proof does not cover what is done, or nobody has checked it
refuted   a counterexample is known: the stated ε does not hold
none      released without noise: no ε bounds it

Neighbours are two data sets of one site that differ in one record (or, where the unit is a participant, in
all of them):

add/remove one   one of them has a record more. The number of records n is protected, too: nothing that is
                 released is divided by n or tells it
zero-out one     in one of them a null record stands in a record's place, one that contributes nothing. Both
                 have the same n, which is public: sums are divided by it
replace one      one record differs. Both have the same n, which is public. The strongest of the three for
                 what it protects of a record: at twice the sensitivity, the others imply it

Events name their guarantee; the words live here, once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Status = Literal["proved", "claimed", "refuted", "none"]
Unit = Literal["record", "participant"]
Neighbours = Literal["add/remove one", "zero-out one", "replace one"]

PUBLIC_COUNT = "the number of records of each site is public"
TOLD_COUNT = "a site that tells how many records it has (share.records) takes that to be public"
DECLARED_COUNT = "data.expected_records is public, and was not chosen by looking at the records"
ASSUMPTIONS = (
    "bounds, categories and standardisation constants are public",
    "test records are the server's and are not protected: every score is computed on them as they are",
    "choosing hyper-parameters is not counted",
)


@dataclass(frozen=True, slots=True)
class Guarantee:
    """What is promised. `unit` is what may change between neighbours: a record, or all of a site's."""

    name: str
    status: Status
    unit: Unit
    neighbours: Neighbours
    reason: str

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What it rests on beside its proof."""
        if self.unit == "participant":
            return (
                "a site that tells how many records it has (share.records) takes that to be public",
                *ASSUMPTIONS,
            )
        return (DECLARED_COUNT if self.neighbours == "add/remove one" else PUBLIC_COUNT, *ASSUMPTIONS)

    @property
    def relation(self) -> Neighbours | None:
        """Which neighbours a record's total is composed for; None: it holds for any change of records."""
        return None if self.unit == "participant" else self.neighbours


def common(relations: Iterable[Neighbours | None]) -> Neighbours | None:
    """Return for which neighbours a total of such guarantees can be stated: the strongest among them."""
    found = {relation for relation in relations if relation is not None}
    return max(found, key=get_args(Neighbours).index, default=None)


_PSGD = (
    "subsampled Gaussian mechanism (Abadi et al. 2016), Poisson samples, each record's gradient clipped, "
    "sums divided by the sample rate times {}, composed over all steps of all rounds by privacy loss "
    "distributions"
)
_SUMS = (
    "sums over records of vectors of bounded norm, divided by {}, released once with Gaussian or Laplace "
    "noise (functional mechanism on an encoder that no record decides, or that was released before); "
    "everything after that, in however many rounds, is computed from what was released"
)
_SITE = "; it holds for all records of a site at once, because truncation bounds any change"

GUARANTEES = {
    guarantee.name: guarantee
    for guarantee in (
        Guarantee("psgd", "proved", "record", "zero-out one", _PSGD.format("the public number of records")),
        Guarantee(
            "psgd_add_remove", "proved", "record", "add/remove one", _PSGD.format("a declared public number")
        ),
        Guarantee(
            "sparse_vector",
            "proved",
            "participant",
            "replace one",
            "sparse vector technique (Lyu, Su, Li 2017, Algorithm 1) on magnitudes truncated to γ, then "
            "Laplace noise on truncated values (sensitivity 2γ each)" + _SITE,
        ),
        Guarantee(
            "sparse_vector_paper",
            "proved",
            "participant",
            "replace one",
            "Fig. 12 of Shokri and Shmatikov 2015 with values truncated before noise, which the figure "
            "omits: c segments of ε₁/c each and c releases of ε₂/(2c)" + _SITE,
        ),
        Guarantee(
            "sparse_vector_as_printed",
            "refuted",
            "participant",
            "replace one",
            "Fig. 12 as printed truncates released values only after noise: a change of 20γ costs ten "
            "times the stated ε, and there is no bound",
        ),
        Guarantee(
            "random_mask",
            "proved",
            "participant",
            "replace one",
            "Gaussian mechanism (analytic calibration, Balle and Wang 2018) on coordinates drawn without "
            "looking at the records, clipped in L2 norm" + _SITE,
        ),
        Guarantee(
            "statistics", "proved", "record", "zero-out one", _SUMS.format("the public number of records")
        ),
        Guarantee(
            "statistics_add_remove",
            "proved",
            "record",
            "add/remove one",
            _SUMS.format("a declared public number"),
        ),
        Guarantee(
            "dpa_paper",
            "claimed",
            "record",
            "replace one",
            "dPA (Phan et al. 2016) adds noise once to coefficients Σ (½ − x) h and Σ h h that change with "
            "every step, because h does: one draw does not cover what all steps reveal together; budget "
            "shared by layers and head, normalisation by public bounds",
        ),
        Guarantee(
            "dpa_as_printed",
            "refuted",
            "record",
            "replace one",
            "dPA (Phan et al. 2016), Eq. 13, normalises by the smallest and largest activation of the "
            "records and ships both with the model, without noise",
        ),
        Guarantee(
            "dpa_as_released",
            "refuted",
            "record",
            "replace one",
            "dPA's released program adds one and the same noise vector to the hidden units of all records, "
            "and the head's intercept absorbs it: the weights are those of a training without noise",
        ),
        Guarantee(
            "pcdbn_paper",
            "claimed",
            "record",
            "replace one",
            "pCDBN (Phan et al. 2017) adds noise once to the coefficients of an energy whose normaliser Z "
            "changes with every step and with the records; one noisy copy for all groups, budget shared "
            "by layers and head, sensitivity over the domain",
        ),
        Guarantee(
            "adlm_paper",
            "claimed",
            "record",
            "replace one",
            "AdLM and ILM (Phan et al. 2017) divide the noise of every input and label by the batch size, as "
            "if a batch's draws added up to one draw (their sum is √batch smaller than its lemmas need); and "
            "relevance comes from a network trained on the records without noise",
        ),
        Guarantee(
            "adlm_as_released",
            "refuted",
            "record",
            "replace one",
            "AdLM's and ILM's released program adds one and the same noise image to all records: the "
            "difference of any two of them is exact",
        ),
        Guarantee(
            "svm",
            "proved",
            "record",
            "replace one",
            "output perturbation (Rubinstein et al. 2012; Chaudhuri et al. 2011): ½‖w‖² + (C/n) Σ smoothed "
            "hinge with ‖z‖ ≤ 1 is 1-strongly convex, so that one record moves w by at most 2C/n, and by as "
            "much more as the accuracy of a fixed number of steps allows; several one-vs-rest problems share "
            "the budget",
        ),
        Guarantee(
            "svm_paper",
            "proved",
            "record",
            "replace one",
            "Algorithm 1 of Li et al. 2014 with C divided by n: its Laplace noise of scale 2^2.5 C √D/(n ε) "
            "is twice what the sensitivity 2C/n asks for",
        ),
        Guarantee(
            "svm_as_printed",
            "refuted",
            "record",
            "replace one",
            "Eq. 3 of Li et al. 2014 as printed does not divide C by n, but the noise is: one record moves w "
            "by up to 2C, which costs nε/2",
        ),
        Guarantee(
            "none",
            "none",
            "record",
            "add/remove one",
            "released without noise, as the site's own file allows: no ε bounds what it tells",
        ),
    )
}
WORST: tuple[Status, ...] = ("none", "refuted", "claimed", "proved")
