"""A trained model as a file of plain PyTorch, without anything of fed_dp."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Literal

from fed_dp.extras import need
from fed_dp.runs.folder import write_output
from fed_dp.runs.saved_model import SavedModel

Form = Literal["state-dict", "torch-export", "onnx"]


def write_model(run: Path, out: Path, *, form: Form = "state-dict") -> None:
    """Write the model of a run.

    Parameters
    ----------
    run
        A finished run's folder, or the model.npz in it.
    out
        The file to write.
    form
        "state-dict" (of the module that `Run.model` returns), "torch-export", or "onnx".

    Raises
    ------
    ConfigError
        When the file cannot be written, or an extra is missing.
    """
    import torch

    if form == "onnx":
        need("onnx", "onnxscript", extra="onnx", what="--onnx")
    model = SavedModel.load(run)
    module, buffer = model.module(), io.BytesIO()
    if form == "state-dict":
        torch.save(module.state_dict(), buffer)
    else:
        # Two records: an exporter takes a batch of one for a batch that is always one.
        example = (torch.zeros(2, *model.shape),)
        batch = {0: torch.export.Dim("batch", min=1)}
        program = torch.export.export(module, example, dynamic_shapes=(batch,))
        if form == "torch-export":
            torch.export.save(program, buffer)
        else:
            made = torch.onnx.export(program, example, dynamo=True, dynamic_shapes=(batch,), verbose=False)
            assert made is not None  # with dynamo
            buffer.write(made.model_proto.SerializeToString())
    write_output(out, buffer.getvalue())
