"""The functional mechanism as three papers use it: polynomials for smooth functions, noise on coefficients.

dPA    Phan, Wang, Wu, Dou, "Differential Privacy Preservation for Deep Auto-Encoders", AAAI 2016.
pCDBN  Phan, Wu, Dou, "Preserving differential privacy in convolutional deep belief networks", 2017.
AdLM   Phan, Wu, Hu, Dou, "Adaptive Laplace Mechanism", ICDM 2017.

The sensitivities here are the papers'. They bound the coefficients of a fixed encoder; in the papers
the encoder is trained on the same records, so that the stated ε is claimed, not proved. The variant
with a proof is `statistics`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.polynomial import Polynomial, chebyshev
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

from fed_dp.errors import PrivacyError
from fed_dp.mechanisms.laplace import check
from fed_dp.mechanisms.noise import LaplaceNoise

Exact = NDArray[np.float64]
ApproximationName = Literal["chebyshev", "taylor", "piecewise", "printed"]
PRINTED = Polynomial(np.array([16, 35, 0, -35, 0, 21, 0, -5]) / 32)  # pCDBN, below Eq. 14


@dataclass(frozen=True, slots=True)
class Approximation:
    """A polynomial for the sigmoid on [−1, 1], by powers: Σ a_l x^l."""

    name: ApproximationName
    coefficients: tuple[float, ...]

    @property
    def error(self) -> float:
        """The largest distance from the sigmoid on [−1, 1]."""
        x = np.linspace(-1, 1, 20_001)
        return float(np.abs(Polynomial(self.coefficients)(x) - expit(x)).max())

    @property
    def range(self) -> tuple[float, float]:
        """Its values at −1 and 1."""
        low, high = Polynomial(self.coefficients)(np.array([-1.0, 1.0]))
        return float(low), float(high)

    @property
    def weight(self) -> float:
        """Σ |a_l|, which the sensitivity of the energy is proportional to."""
        return float(np.abs(self.coefficients).sum())


def approximation(name: ApproximationName, degree: int = 7) -> Approximation:
    """Approximate the sigmoid on [−1, 1] by a polynomial of the given degree.

    chebyshev   its Chebyshev series, cut (interpolation at enough Chebyshev points)
    taylor      its Taylor series at 0
    piecewise   one linear piece through its values at −1 and 1 (degree 1)
    printed     what pCDBN prints for degree 7. It is not the Chebyshev series of the sigmoid but
                ½ + (35/32) ∫₀ˣ (1 − t²)³ dt, wrong by .32, at 4.5 times the sensitivity
    """
    if not 1 <= degree <= 15:
        raise PrivacyError(f"degree = {degree!r}: expected 1 to 15")
    if name == "chebyshev":
        series = chebyshev.chebinterpolate(expit, 60)[: degree + 1]
        return Approximation(name, _plain(chebyshev.cheb2poly(series), degree))
    if name == "taylor":
        return Approximation(name, _plain(_taylor(degree), degree))
    if name == "piecewise":
        return Approximation(name, (0.5, float(expit(1.0)) - 0.5))
    if name == "printed":
        return Approximation(name, _plain(PRINTED.coef, 7))
    raise PrivacyError(f"approximation = {name!r}: expected one of {', '.join(get_args(ApproximationName))}")


def cross_entropy_error(largest: float) -> float:
    """Return how wrong log 2 + (½ − y) z + z²/8 is for |z| up to `largest`: the same for y = 0 and 1."""
    z = np.linspace(-largest, largest, 20_001)
    return float(np.abs(np.logaddexp(0, z) - (math.log(2) + z / 2 + z * z / 8)).max())


def cross_entropy_error_bound(largest: float, outputs: int = 1) -> float:
    """How much larger the cross-entropy is at the truncated one's minimiser than at its own, per record.

    F(θ̂) − F(θ̃) with θ̂ = arg min F̂ (truncated) and θ̃ = arg min F, both over the same parameters, is at most
    this: truncation never adds (F̂ ≥ F), so that F(θ̂) ≤ F̂(θ̂) ≤ F̂(θ̃) ≤ F(θ̃) + the error at θ̃. It takes the
    place of dPA's Lemma 4 and AdLM's Lemma 7 (`printed_cross_entropy_error_bound`).

    Parameters
    ----------
    largest
        The largest |z| = |W h| of any record and output under θ̃.
    outputs
        Logistic outputs: d that are reconstructed (dPA, Eq. 16), 1 (Eq. 17), or M classes (AdLM, Eq. 37).
    """
    check(largest=largest)
    return outputs * cross_entropy_error(largest)


def printed_cross_entropy_error_bound(outputs: int = 1) -> float:
    """(e² + 2e − 1) / (e (1 + e)²) = .3147 per output: dPA, Lemma 4 (Eqs. 16, 17), AdLM, Lemma 7 (Eq. 37).

    Wrong as printed: its proof takes the remainder for |z| ≤ 1, which nothing ensures, and a few records of
    large |z| exceed it. Where |z| ≤ 1 does hold it is 64 times `cross_entropy_error_bound`: the third
    derivative of log(1 + e⁻ᶻ) is another (σ(1 − σ)(1 − 2σ), without y or the 2), and a factor 1/6 is lost.

    Parameters
    ----------
    outputs
        Logistic outputs: d, 1, or M.
    """
    return outputs * (math.e**2 + 2 * math.e - 1) / (math.e * (1 + math.e) ** 2)


def sigmoid_coefficient(degree: int) -> float:
    """A_k = (2/π) ∫ σ(x) T_k(x) / √(1 − x²) dx (pCDBN, Eq. 10): 0 for even k > 0, since σ − ½ is odd."""
    found = float(chebyshev.chebinterpolate(expit, 60)[degree])
    return 2 * found if degree == 0 else _plain([found], 0)[0]


def sigmoid_error_floor(degree: int) -> float:
    """Least error on [−1, 1] of any polynomial for the sigmoid: (π/4) |A_{L+1}| (pCDBN, Eq. 20).

    For odd L that is 0; but there L + 1 is no better than L, so that it is taken of L + 1.

    Parameters
    ----------
    degree
        L, of the polynomial.
    """
    return math.pi / 4 * abs(sigmoid_coefficient(degree + 1 + degree % 2))


def sigmoid_error_ceiling(degree: int, best: float) -> float:
    """Largest error of the Chebyshev series, cut: (4 + (4/π²) log L) U_L (pCDBN, Eq. 21).

    Parameters
    ----------
    degree
        L, of the series.
    best
        U_L: the error of the best polynomial of that degree.
    """
    return (4 + 4 / math.pi**2 * math.log(degree)) * best


def energy_error_bound(
    approximation: Approximation, *, units: int, largest: float, normalised: bool = True
) -> float:
    """Largest error of a record's energy with a polynomial in place of the sigmoid.

    A unit's part of the energy is σ(X) t with t = W * v + b and X = t/Z, so its error is at most |t| times
    that of σ. Compared with Eq. 12, where σ is of t itself, X (of the same sign, and smaller) adds at most
    σ(|t|) − ½. It takes the place of pCDBN's Lemma 3 (`printed_energy_error_floor`, `…_ceiling`).

    Parameters
    ----------
    approximation
        The polynomial.
    units
        Hidden units, N_H² K.
    largest
        The largest |W * v + b| of any unit.
    normalised
        Whether the error is of the energy with X (Eq. 14), or of that without normalisation (Eq. 12).
    """
    check(largest=largest)
    shift = 0.0 if normalised else float(expit(largest)) - 0.5
    return units * largest * (approximation.error + shift)


def printed_energy_error_floor(degree: int, units: int) -> float:
    """(π/4) N_H² K |A_{L+1}|, below which no energy's error is said to be (pCDBN, Lemma 3, Eq. 19).

    Wrong as printed: it forgets that a unit's part of the energy is σ times t. Over |t| ≤ 1 polynomials come
    closer than that (for even L; for odd L it is 0), and where W and b are 0 there is no error at all.

    Parameters
    ----------
    degree
        L, of the polynomial.
    units
        Hidden units, N_H² K.
    """
    return math.pi / 4 * units * abs(sigmoid_coefficient(degree + 1))


def printed_energy_error_ceiling(degree: int, units: int, best: float) -> float:
    """(4 + (4/π²) log L) N_H² K U_L(E), above which no energy's error is said to be (pCDBN, Lemma 3, Eq. 19).

    Wrong as printed for the energy of Eq. 12, from which the normaliser Z is missing: replacing t by t/Z
    alone costs more. For the normalised energy it counts the units twice, since U_L(E) is of all of them.

    Parameters
    ----------
    degree
        L, of the polynomial.
    units
        Hidden units, N_H² K.
    best
        U_L(E): the error of the best polynomial in place of the sigmoid, for all units.
    """
    return units * sigmoid_error_ceiling(degree, best)


def energy_monomials(approximation: Approximation, *, patch: int) -> tuple[int, int]:
    """How many monomials of W, b and c one group's energy has (pCDBN, Eq. 14), and how many of degree 1.

    Σ_l α_l (W * v + b)^(l+1), for a normaliser that is held fixed, has every monomial of degree l + 1 in N_W²
    weights and b for which α_l ≠ 0; c has one.

    Parameters
    ----------
    approximation
        The polynomial: α_0 … α_L.
    patch
        Numbers in a filter, N_W² (times channels).
    """
    terms = [k for k, coefficient in enumerate(approximation.coefficients) if coefficient]
    return 1 + sum(math.comb(patch + 1 + k, k + 1) for k in terms), patch + 2


def auto_encoder_sensitivity(inputs: int, hidden: int) -> float:
    """Δ = d (b + b²/4) of the truncated reconstruction (dPA, Lemma 2), for x and h in [0, 1]."""
    return inputs * (hidden + hidden**2 / 4)


def head_sensitivity(hidden: int, classes: int = 1) -> float:
    """Δ = b + b²/4 of the truncated cross-entropy (dPA, Lemma 3), for each of `classes` outputs."""
    return classes * (hidden + hidden**2 / 4)


def energy_sensitivity(
    approximation: Approximation, *, hidden: int, patch: int, visible: int, largest: float = 1.0
) -> float:
    """Δ of the truncated energy of one group (pCDBN, Eq. 15), over the domain |v| ≤ largest.

    `hidden` units per group (N_H²), patches of `patch` numbers (N_W²), `visible` units (N_V²). The
    paper's maximum runs over the records at hand, which would itself reveal them; here it runs over
    the domain, with (Σ v + 1)/Z at its largest value, 1. Its last sum stands inside the 2 · max.
    """
    check(largest=largest)
    inside = approximation.weight * (1 + patch * largest)
    return 2 * (hidden * inside + visible * largest)


def relevance_sensitivity(inputs: int, records: int) -> float:
    """Δ_R = 2d/|D| of the mean relevances of d inputs, each in [0, 1] (AdLM, Lemma 1)."""
    return 2 * inputs / records


def first_layer_sensitivity(neurons: int, inputs: int) -> float:
    """Δ_h0 = 2 |h0| d of the first affine layer's sums over a batch (AdLM, Lemma 3)."""
    return 2.0 * neurons * inputs


def released_first_layer_sensitivity(channels: int, height: int, width: int, *, side: int) -> float:
    """Δ of the first layer in AdLM's released programs: 2 · channels · (height/2) · (width/2) · side².

    They have numbers, 2·14·14·25 for MNIST and 3·2·10·10·9 for CIFAR-10 cut to 20×20, and explain them as
    "2*|feature_map|*|unit_patch|" and "2*|chanels|*|feature_map|*|unit_patch|": the map after pooling by 2
    (after a stride of 2 for CIFAR-10), and a filter of `side` × `side`. For other sizes, this is our reading
    of that comment. No lemma derives it: Lemma 3 has 2 |h0| d.
    """
    return 2.0 * channels * (height // 2) * (width // 2) * side**2


def coefficient_noise(
    shape: tuple[int, ...], *, sensitivity: float, epsilon: float, noise: LaplaceNoise
) -> Exact:
    """Return the Laplace noise, of scale Δ/ε, that is added to coefficients of this shape, once."""
    check(sensitivity=sensitivity, epsilon=epsilon)
    return noise.laplace(np.zeros(shape), scale=sensitivity / epsilon)


def _taylor(degree: int) -> list[float]:
    """Return the sigmoid's derivatives at 0 over l!: with s′ = s − s², each is a polynomial in s."""
    in_s = Polynomial([0.0, 1.0])
    slope = Polynomial([0.0, 1.0, -1.0])
    found = []
    for order in range(degree + 1):
        found.append(float(in_s(0.5)) / math.factorial(order))
        in_s = in_s.deriv() * slope
    return found


def _plain(coefficients: ArrayLike, degree: int) -> tuple[float, ...]:
    given = np.asarray(coefficients, np.float64)
    values = np.zeros(degree + 1)
    values[: len(given)] = given
    return tuple(float(v) if abs(v) > 1e-12 else 0.0 for v in values)
