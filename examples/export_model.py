"""Plain PyTorch at the end: `fed-dp export RUN model.pt`, and the file in a program without fed_dp."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import fed_dp


def main(engine: str = "auto") -> str:
    run = fed_dp.simulate("digits:psgd", settings=["clients.count=5"], rounds=3, engine=engine)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "model.pt2"
        command = [sys.executable, "-m", "fed_dp.cli", "export", str(run.folder), str(file), "--torch-export"]
        subprocess.run(command, check=True)
        program = (
            "import sys, torch; model = torch.export.load(sys.argv[1]).module(); "
            "print(model(torch.zeros(3, 1, 8, 8)).argmax(1).tolist(), 'fed_dp' in sys.modules)"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, str(file)], check=True, capture_output=True, text=True
        )
    print(done.stdout)
    return done.stdout


if __name__ == "__main__":
    main()
