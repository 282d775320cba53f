"""Where noise comes from. The name of the source is stamped on everything that is released.

simulation  seeded NumPy, in floating point. Repeatable, hence for research alone: whoever knows the
            seed removes the noise, and the low bits of a float sum tell what was added to.
secure      the operating system's entropy and OpenDP's exact samplers, on whole multiples of a power
            of two: what is released is exactly discrete Laplace or discrete Gaussian.

Floating-point Laplace noise leaks through its support (Mironov, CCS 2012), so a source that has
no exact sampler is never called secure.
"""

from __future__ import annotations

import math
import os
import sys
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from fed_dp.errors import PrivacyError
from fed_dp.seeds import Generator

NoiseSource = Literal["simulation", "secure"]
Reals = NDArray[np.floating[Any]]
Integers = NDArray[np.int64]
_SIGN_BYTE = 7 if sys.byteorder == "little" else 0  # of a float64
FINENESS = 2.0**-40  # of the secure grid, in units of the noise's scale
MAX_MULTIPLES = 2.0**61  # multiples of it that a sum may be
_LOW = 31  # bits of the lower half of an exact sum


class Noise(Protocol):
    """A source of noise. It adds to values rather than hands out noise, so that it can do so exactly."""

    name: NoiseSource

    def laplace(self, values: Reals, *, scale: float) -> NDArray[np.float64]:
        """Return values + independent Laplace noise of the given scale (variance 2 scale²)."""
        ...

    def gaussian(self, values: Reals, *, scale: float) -> NDArray[np.float64]:
        """Return values + independent Gaussian noise of the given standard deviation."""
        ...

    def spherical(self, values: Reals, *, scale: float) -> NDArray[np.float64]:
        """Return values + one noise vector of density ∝ exp(−‖x‖₂/scale)."""
        ...

    def shuffled(self, items: Integers) -> Integers:
        """Return the items in random order, which is as secret as the noise."""
        ...


class LaplaceNoise(Protocol):
    """A source of Laplace noise."""

    def laplace(self, values: Reals, *, scale: float) -> NDArray[np.float64]:
        """Return values + independent Laplace noise of the given scale."""
        ...


class KeptNoise:
    """Laplace noise that was drawn before: numbers of Lap(1), used in their order, each once."""

    def __init__(self, drawn: Reals) -> None:
        self._drawn, self._used = drawn, 0

    def laplace(self, values: Reals, *, scale: float) -> NDArray[np.float64]:
        """Add the next numbers, scaled."""
        shape, start = np.shape(values), self._used
        self._used += int(np.prod(shape))
        if self._used > len(self._drawn):
            raise PrivacyError("more noise is asked for than was drawn; nothing was sent")
        return np.asarray(values + scale * self._drawn[start : self._used].astype(np.float64).reshape(shape))


class SimulationNoise:
    """Seeded noise in floating point. Not secure."""

    name: NoiseSource = "simulation"

    def __init__(self, rng: Generator) -> None:
        self._rng = rng

    def laplace(self, values: Reals, *, scale: float) -> NDArray[np.float64]:
        """Add an exponential with a random sign, which is Laplace and more than twice as fast."""
        noise = self._rng.standard_exponential(np.shape(values))
        noise *= scale
        bits = np.frombuffer(self._rng.bytes(-(-noise.size // 8)), np.uint8)
        signs = noise.reshape(-1).view(np.uint8)[_SIGN_BYTE::8]
        signs ^= np.unpackbits(bits, count=noise.size) << 7
        noise += values
        return noise

    def gaussian(self, values: Reals, *, scale: float) -> NDArray[np.float64]:
        """Add normal noise."""
        noise = self._rng.standard_normal(np.shape(values))
        noise *= scale
        noise += values
        return noise

    def spherical(self, values: Reals, *, scale: float) -> NDArray[np.float64]:
        """Add a random direction times a Gamma length."""
        direction = self._rng.standard_normal(np.shape(values))
        length = self._rng.gamma(direction.size, scale)
        direction *= length / np.linalg.norm(direction)
        direction += values
        return direction

    def shuffled(self, items: Integers) -> Integers:
        """Permute."""
        return self._rng.permutation(items)


class SecureNoise:
    """The operating system's entropy through OpenDP's exact discrete samplers.

    Values are cut towards zero to multiples of a power of two, which no record decides; that makes
    no bound on a value larger (a difference of two may grow by one multiple). Then OpenDP adds discrete
    noise to whole numbers, without rounding.
    """

    name: NoiseSource = "secure"

    def __init__(self) -> None:
        try:
            import opendp.prelude as dp
        except ImportError:
            raise PrivacyError(
                "privacy.noise_source = 'secure' needs OpenDP's exact samplers, which are not installed: "
                "pip install 'fed-dp[secure]'"
            ) from None
        dp.enable_features("contrib")
        self._dp = dp

    def laplace(self, values: Reals, *, scale: float) -> NDArray[np.float64]:
        """Add discrete Laplace noise."""
        dp = self._dp
        return self._add(values, scale, dp.l1_distance(T="i64"), dp.m.make_laplace)

    def gaussian(self, values: Reals, *, scale: float) -> NDArray[np.float64]:
        """Add discrete Gaussian noise, of the same zCDP (Canonne, Kamath, Steinke 2020, Theorem 4)."""
        dp = self._dp
        return self._add(values, scale, dp.l2_distance(T="i64"), dp.m.make_gaussian)

    def spherical(self, values: Reals, *, scale: float) -> NDArray[np.float64]:
        """Refuse: no exact sampler is known to us."""
        raise PrivacyError("noise of random direction has no exact sampler; allowed: laplace, gaussian")

    def shuffled(self, items: Integers) -> Integers:
        """Sort by keys from the operating system."""
        return items[np.argsort(np.frombuffer(os.urandom(8 * len(items)), np.uint64))]

    def check(self, largest: float, *, scale: float) -> None:
        """Refuse noise that is too fine for values up to `largest`, which no record decides."""
        if largest / grid(scale) >= MAX_MULTIPLES:
            raise PrivacyError(f"noise of scale {scale:g} is too small for values up to {largest:g}")

    def whole(self, values: Reals, *, scale: float) -> Integers:
        """Cut values towards zero to whole multiples of what noise of this scale is added to.

        Sums of these are exact, so that what bounds one of them bounds its part of a sum.
        """
        found = np.trunc(np.asarray(values, np.float64) / grid(scale))
        if found.size and not np.abs(found).max() < MAX_MULTIPLES:
            raise PrivacyError(
                f"noise of scale {scale:g} is too small for values of this size; nothing was sent"
            )
        return found.astype(np.int64)

    def gaussian_on_whole(self, whole: Integers, *, scale: float) -> NDArray[np.float64]:
        """Add discrete Gaussian noise to (sums of) whole multiples."""
        dp = self._dp
        return self._noisy(whole, scale, dp.l2_distance(T="i64"), dp.m.make_gaussian)

    def laplace_on_whole(self, whole: Integers, *, scale: float) -> NDArray[np.float64]:
        """Add discrete Laplace noise to (sums of) whole multiples."""
        dp = self._dp
        return self._noisy(whole, scale, dp.l1_distance(T="i64"), dp.m.make_laplace)

    def _add(self, values: Reals, scale: float, metric: Any, make: Any) -> NDArray[np.float64]:
        return self._noisy(self.whole(values, scale=scale), scale, metric, make)

    def _noisy(self, whole: Integers, scale: float, metric: Any, make: Any) -> NDArray[np.float64]:
        step = grid(scale)
        domain = self._dp.vector_domain(self._dp.atom_domain(T="i64"))
        noisy = make(domain, metric, scale=scale / step)(whole.ravel().tolist()) if whole.size else []
        return np.asarray(noisy, np.float64).reshape(whole.shape) * step


class ExactSum:
    """A sum of whole multiples of a grid, without rounding and without wrapping.

    It is kept in two halves, which hold any sum of up to 2³¹ terms. Beyond ±MOST it is MOST: clipping a sum
    moves no two of them further apart, so that what bounds one term's part still does.
    """

    def __init__(self, size: int) -> None:
        self._high, self._low = np.zeros(size, np.int64), np.zeros(size, np.int64)

    def add(self, whole: Integers) -> None:
        """Add one term."""
        self._high += whole >> _LOW
        self._low += whole & (2**_LOW - 1)

    def taken(self) -> Integers:
        """Return the sum, and begin again from 0."""
        high, low = self._high + (self._low >> _LOW), self._low & (2**_LOW - 1)
        most = int(MAX_MULTIPLES) >> _LOW
        total = np.clip(high, -most, most - 1) * 2**_LOW + low
        self._high[:], self._low[:] = 0, 0
        return np.where(high >= most, int(MAX_MULTIPLES), np.where(high < -most, -int(MAX_MULTIPLES), total))


def grid(scale: float) -> float:
    """Return the power of two whose multiples a secure source adds noise of this scale to."""
    return float(2.0 ** math.floor(math.log2(scale)) * FINENESS)
