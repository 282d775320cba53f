"""An own network, loss and data: ten hospitals, a binary task, DP-SGD at ε = 4 for each record."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

import fed_dp


class Residual(nn.Module):
    """A network of one's own: GroupNorm, a residual block, one logit."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.into = nn.Linear(30, width)
        self.norm = nn.GroupNorm(4, width)
        self.block = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x).relu()
        return self.out(h + self.block(self.norm(h)).relu())


def main(rounds: int = 10, engine: str = "auto") -> fed_dp.Run:
    source = load_breast_cancer()
    # Inputs are scaled by public knowledge alone: the ranges of the measuring instrument, here powers of ten.
    high = 10.0 ** np.ceil(np.log10(np.abs(source.data).max(0)))
    x, y = (source.data / high * 4).astype(np.float32), source.target
    test = np.arange(len(y)) % 4 == 0
    hospital = np.arange((~test).sum()) % 10
    run = fed_dp.simulate(
        model=Residual,
        data=fed_dp.Data.from_arrays(x[~test], y[~test], client=hospital, test=(x[test], y[test])),
        task="binary",
        trainer=fed_dp.Psgd(sample_rate=0.2, clip=1.0, learning_rate=0.5),
        strategy=fed_dp.Averaging(),
        privacy=fed_dp.Budget(epsilon=4, delta=1e-5),
        rounds=rounds,
        engine=engine,
    )
    print(run.privacy)  # total ε, δ, unit, neighbours, proved or claimed, and why
    print(run.history[["round", "auc", "epsilon"]])
    run.history.plot(x="round", y=["auc", "epsilon"]).figure.savefig("history.png")  # a pandas DataFrame
    print(run.model)  # the module above, trained
    torch.save(run.model.state_dict(), "model.pt")
    return run


if __name__ == "__main__":
    main()
