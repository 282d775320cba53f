"""The app's own model, data and training: plain PyTorch."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


def load_data(partition_id: int, num_partitions: int) -> tuple[DataLoader, DataLoader]:
    x, y = load_digits(return_X_y=True)
    rows = np.arange(len(y))
    test = rows % 5 == 0
    mine = ~test & (rows % num_partitions == partition_id)
    tensors = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
    parts = (TensorDataset(*(t[torch.from_numpy(mask)] for t in tensors)) for mask in (mine, test))
    train, held_out = parts
    return DataLoader(train, batch_size=32), DataLoader(held_out, batch_size=256)


def train(net: nn.Module, loader: DataLoader, epochs: int, lr: float) -> float:
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=lr)
    total = 0.0
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(net(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(loader))


def test(net: nn.Module, loader: DataLoader) -> float:
    with torch.no_grad():
        right = sum(int((net(x).argmax(1) == y).sum()) for x, y in loader)
    return right / len(loader.dataset)  # type: ignore[arg-type]
