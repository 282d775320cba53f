"""A pre-trained encoder from a file, frozen, under statistics and under pSGD on the head."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from sklearn.datasets import load_digits
from torch import nn

import fed_dp


class Encoder(nn.Module):
    """Some network of one's own; here two convolutions."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Flatten(),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def pretrain(path: Path, steps: int = 300) -> None:
    """Train it on what is public: here digits 0 to 4, of which the sites below have none."""
    torch.manual_seed(0)
    x, y = load_digits(return_X_y=True)
    public = y < 5
    images = torch.from_numpy(x[public] / 16).float().reshape(-1, 1, 8, 8)
    encoder = Encoder()
    network = nn.Sequential(encoder, nn.Linear(16 * 16, 5))
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    for _ in range(steps):
        rows = torch.randint(len(images), (64,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images[rows]), torch.from_numpy(y[public])[rows]).backward()
        optimizer.step()
    torch.save(encoder.state_dict(), path)


def main(rounds: int = 5, engine: str = "auto") -> dict[str, fed_dp.Run]:
    x, y = load_digits(return_X_y=True)
    private = y >= 5
    data = fed_dp.Data.from_arrays((x[private] / 16).astype("float32").reshape(-1, 1, 8, 8), y[private] - 5)
    runs = {}
    with TemporaryDirectory() as folder:
        weights = Path(folder) / "encoder.pt"
        pretrain(weights)
        for name, trainer, strategy in (
            ("frozen-encoder", fed_dp.Dpa(), fed_dp.Statistics()),
            ("frozen-linear", fed_dp.Psgd(sample_rate=0.25, learning_rate=16.0), fed_dp.Averaging()),
        ):
            runs[name] = fed_dp.simulate(
                data=data,
                model={"name": name, "weights": str(weights), "factory": "frozen_encoder:Encoder"},
                trainer=trainer,
                strategy=strategy,
                privacy=fed_dp.Budget(epsilon=2, delta=1e-5),
                clients=5,
                rounds=rounds,
                engine=engine,
            )
            print(name, runs[name].scores, f"ε = {runs[name].epsilon:.3f}")
    return runs


if __name__ == "__main__":
    main()
