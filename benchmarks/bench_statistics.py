"""statistics/vs-cnn: a proved fit with the scattering encoder against ten epochs of DSSGD's CNN, batch 32.

Both on one thread and on the same number of generated images of MNIST's size (CNN: in its 32 × 32 frame);
the fit is both stages, encoder, noise and solution included. One epoch is timed, ten are counted.
"""

from __future__ import annotations

import entries
import numpy as np

from fed_dp.accounting import Gaussian
from fed_dp.clients.dpa import Dpa
from fed_dp.clients.functional.statistics import StatisticsTrainer
from fed_dp.clients.sgd import Sgd
from fed_dp.clients.sgd.trainer import SgdTrainer
from fed_dp.clients.trainer import ClientData
from fed_dp.mechanisms import SimulationNoise
from fed_dp.mechanisms.statistics import NoiseSpec
from fed_dp.models import FlatNetwork, Solver, use_one_thread
from fed_dp.models.network import NetworkSpec

RECORDS, EPOCHS, REPEATS, LIMIT = 3000, 10, 3, 1.0
STAGES = (Gaussian(16.0), Gaussian(4.0))


def main() -> None:
    use_one_thread()
    rng = np.random.default_rng(0)
    small, large = (rng.normal(size=(RECORDS, 1, side, side)).astype(np.float32) for side in (28, 32))
    y = rng.integers(0, 10, RECORDS)
    net = FlatNetwork(NetworkSpec.named("scattering", (1, 28, 28), 10))
    trainer = StatisticsTrainer(Dpa(name="dpa"), net, stages=STAGES, sites=1, sends_statistics=True)
    solver = Solver(NetworkSpec.named("scattering", (1, 28, 28), 10), cross=1.0)

    def fit() -> None:
        weights = net.weights()
        for stage, release in enumerate(STAGES, 1):
            noise = SimulationNoise(np.random.default_rng(stage))
            mean = trainer.release(weights, ClientData(small, y, 0, stage, 0), stage, noise)
            amount = NoiseSpec("gaussian", release.noise_multiplier)
            weights = solver.put(weights, stage, mean, noise_spec=amount, ridge=0.5, records=RECORDS)

    cnn = FlatNetwork(NetworkSpec.named("dssgd-cnn-mnist", (1, 32, 32), 10))
    sgd = SgdTrainer(Sgd(learning_rate=0.01, batch_size=32), cnn)
    start = cnn.weights()

    def epoch() -> None:
        sgd.fit(start, ClientData(large, y, 0, 1, 0), {})

    value, one = entries.medians(fit, epoch, repeats=REPEATS + 1, dropped=1)
    baseline = EPOCHS * one
    entries.add(
        "statistics/vs-cnn", value=value, unit="s", baseline=baseline, ratio=value / baseline, limit=LIMIT
    )


if __name__ == "__main__":
    main()
