"""The wavelet scattering transform of images: fixed filters, no parameters, nothing learnt from records.

Reference: Bruna and Mallat, "Invariant Scattering Convolution Networks", PAMI 2013. Two scales
(J = 2), eight angles: 1 + 16 + 64 = 81 channels per input channel, at a quarter of the resolution.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

SCALES, ANGLES = 2, 8  # J, L
CHANNELS = 1 + SCALES * ANGLES + ANGLES**2 * SCALES * (SCALES - 1) // 2  # 81
BATCH = 32
MARGIN = 2**SCALES  # pixels on each side, reflected, before the circular convolution


class Scattering(nn.Module):
    """Map images (C, H, W) to (81·C, H/4, W/4).

    S₀ = x ⋆ φ, S₁ = |x ⋆ ψ₁| ⋆ φ, S₂ = ||x ⋆ ψ₁| ⋆ ψ₂| ⋆ φ, with Morlet wavelets ψ at octave j and
    angle θ, a Gaussian φ, and only paths of growing scale. Convolutions with ψ are products of
    spectra; φ, being separable, is one small matrix from each side, which also takes every fourth
    pixel and drops the margin.
    """

    wavelets_0: Tensor
    wavelets_1: Tensor  # a quarter of it: the part that folding adds up

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self.height, self.width = height // MARGIN, width // MARGIN  # of the output
        rows, columns = height + height % 2 + 2 * MARGIN, width + width % 2 + 2 * MARGIN
        self._padding = (MARGIN, columns - width - MARGIN, MARGIN, rows - height - MARGIN)
        for octave in range(SCALES):
            angles = [k * math.pi / ANGLES for k in range(ANGLES)]
            bank = np.stack([_morlet(rows, columns, octave, angle) for angle in angles]) / 4**octave
            self.register_buffer(
                f"wavelets_{octave}", torch.from_numpy(bank.astype(np.complex64)), persistent=False
            )
            for name, size, out in (("rows", rows, self.height), ("columns", columns, self.width)):
                low = _low_pass(size // 2**octave, out, octave)
                self.register_buffer(f"{name}_{octave}", torch.from_numpy(low), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform images, few at a time: larger batches leave the processor's cache."""
        return torch.cat([self._transformed(part) for part in torch.split(x, BATCH)])

    def _transformed(self, x: Tensor) -> Tensor:
        x = functional.pad(x, self._padding, mode="reflect")
        spectrum = torch.fft.fft2(x)[:, :, None]
        fine = torch.fft.ifft2(spectrum * self.wavelets_0).abs()
        coarse = torch.fft.ifft2(_folded(spectrum, self.wavelets_1)).abs()
        second = torch.fft.ifft2(_folded(torch.fft.fft2(fine)[:, :, :, None], self.wavelets_1)).abs()
        parts = [
            self._low(x[:, :, None], 0),
            self._low(fine, 0),
            self._low(coarse, 1),
            self._low(second.flatten(2, 3), 1),
        ]
        return torch.cat(parts, dim=2).flatten(1, 2)

    def _low(self, maps: Tensor, octave: int) -> Tensor:
        rows, columns = self.get_buffer(f"rows_{octave}"), self.get_buffer(f"columns_{octave}")
        return rows @ maps @ columns.T


def _folded(spectrum: Tensor, wavelets: Tensor) -> Tensor:
    """Return the folded product: its inverse transform is every second pixel of the whole one's.

    Quadrant by quadrant, which on a CPU takes a twentieth of the time of product, then sum.
    """
    rows, columns = spectrum.shape[-2] // 2, spectrum.shape[-1] // 2
    halves = [
        (a, b) for a in (slice(rows), slice(rows, None)) for b in (slice(columns), slice(columns, None))
    ]
    first, *others = ((..., a, b) for a, b in halves)
    out = spectrum[first] * wavelets[first]
    for quadrant in others:
        out.addcmul_(spectrum[quadrant], wavelets[quadrant])
    return out


def _morlet(rows: int, columns: int, octave: int, angle: float) -> NDArray[np.float32]:
    """Return the spectrum, which is real, of a Morlet wavelet: ξ = 3π/4 · 2⁻ʲ, σ = .8 · 2ʲ, slant 4/L."""
    sigma, frequency, slant = 0.8 * 2**octave, 0.75 * math.pi / 2**octave, 4 / ANGLES
    y, x = np.meshgrid(_centred(rows), _centred(columns), indexing="ij")
    along, across = x * math.cos(angle) + y * math.sin(angle), y * math.cos(angle) - x * math.sin(angle)
    bell = np.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2))
    wave = bell * np.exp(1j * frequency * along)
    wave -= bell * (wave.sum() / bell.sum())  # no response to a constant
    norm = 2 * math.pi * sigma**2 / slant
    spectrum: NDArray[np.float32] = np.fft.fft2(wave / norm).real.astype(np.float32)
    return spectrum


def _low_pass(size: int, out: int, octave: int) -> NDArray[np.float32]:
    """Return the matrix that smooths one side of a map, of pixels 2ʲ apart, and samples it every fourth."""
    sigma = 0.8 * 2 ** (SCALES - 1)
    step = 2**octave
    place = np.arange(size) * step
    centre = MARGIN + MARGIN * np.arange(out)
    bell = np.exp(-((place[None] - centre[:, None]) ** 2) / (2 * sigma**2))
    low: NDArray[np.float32] = (bell / bell.sum(1, keepdims=True)).astype(np.float32)
    return low


def _centred(size: int) -> NDArray[np.float64]:
    """Return 0, 1, …, −1: coordinates whose origin is the first pixel."""
    return np.asarray(np.fft.fftfreq(size, 1 / size), np.float64)
