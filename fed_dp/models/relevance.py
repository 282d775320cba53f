"""Layer-wise relevance propagation: which inputs a network's decision rests on.

Reference: Bach et al., "On Pixel-Wise Explanations …", PLoS ONE 2015; AdLM (Phan et al. 2017), Eqs. 4–9. The
network is a sequence of linear, convolution and pooling layers with activations and normalisations
between them. No privacy by itself: relevance of records is computed from them. Here it is taken of public
records, under a network that was trained on public records or is private already.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fed_dp.errors import ModelError

STABILISER = 1e-6  # μ of Eq. 5
_SHARING = (nn.Linear, nn.Conv2d, nn.AvgPool2d, nn.MaxPool2d)  # relevance is divided among their inputs
_SHAPING = (nn.Flatten,)


@dataclass(frozen=True, slots=True)
class Relevance:
    """Of each input, and what the biases (and the stabiliser) took: together they are the outcome."""

    inputs: Tensor
    biases: Tensor
    outcome: Tensor


@torch.no_grad()
def relevance(layers: nn.Sequential, x: Tensor, y: Tensor) -> Relevance:
    """Return the relevance of every input for the output of the record's own class (Eqs. 4–8).

    A layer with z_m = Σ_p z_pm + b_m hands z_pm / (z_m ± μ) of m's relevance down to p. Activations and
    normalisations, which act on each unit alone or nearly so, hand it on unchanged; a maximum hands it to
    the one it took. A last LogSoftmax is left out: the outcome is the logit.
    """
    parts = [part for part in layers if not isinstance(part, nn.LogSoftmax)]
    seen = [x]
    for part in parts:
        seen.append(part(seen[-1]))
    logits = seen[-1]
    if logits.dim() != 2:
        raise ModelError(f"relevance needs a network that ends in logits; it ends in shape {logits.shape}")
    outcome = logits.gather(1, y[:, None])
    left = torch.zeros_like(logits).scatter(1, y[:, None], outcome)
    for part, inputs in zip(reversed(parts), reversed(seen[:-1]), strict=True):
        if isinstance(part, _SHARING):
            left = _shared(part, inputs, left)
        elif isinstance(part, _SHAPING):
            left = left.reshape(inputs.shape)
        elif left.shape != inputs.shape:
            raise ModelError(f"relevance cannot pass a layer of kind {type(part).__name__}")
    total = outcome[:, 0]
    return Relevance(left, total - left.flatten(1).sum(1), total)


def _shared(layer: nn.Module, inputs: Tensor, relevance: Tensor) -> Tensor:
    """Divide relevance as z_pm / (z_m ± μ): a · ∂(Σ z s)/∂a with s = R / (z ± μ)."""
    with torch.enable_grad():
        a = inputs.detach().requires_grad_()
        z = layer(a)
        stable = z.detach() + torch.where(z >= 0, STABILISER, -STABILISER)
        [slope] = torch.autograd.grad(z, a, relevance / stable)
    return (a * slope).detach()
