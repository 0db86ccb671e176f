"""`paceline export`: what a run learned as an ONNX file, checked against PyTorch."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.core.errors import UserError, install_extra
from paceline.core.new_file import check_new, written_beside
from paceline.inference.exportable import Exportable, classifying, generating, restoring
from paceline.inference.image_model import make_image_model
from paceline.inference.trained import Stored, main_use, open_trained, read_stored
from paceline.runs.stages import last_finished

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
OPSET = 20
TOLERANCE = 1e-4  # of values in -1…1: a fiftieth of a level of 255


def export(path: str, out: str, checkpoint: str, *, overwrite: bool = False) -> int:
    """Writes the file, runs it, and says how far its results are from PyTorch's."""
    target = check_new(out, (".onnx",), overwrite=overwrite)
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"export needs {', '.join(missing)}: {install_extra('export')}")
    path = last_finished(path)
    stored = read_stored(path, checkpoint)
    exportable = _exportable(stored, path)
    with written_beside(target) as beside:
        _write(exportable, beside)
        worst = _largest_difference(exportable, beside, path)
        if not worst <= TOLERANCE:
            raise UserError(f"--out {out}: not written, since its results differ from PyTorch's by {worst:.1e}")
    print(f"{stored.config.recipe_name} from {stored.origin} → {target} ({target.stat().st_size / 1e6:.1f} MB)")
    print(exportable.words)
    print(f"largest difference from PyTorch, {exportable.checked}: {worst:.1e}")
    return 0


def _exportable(stored: Stored, path: str) -> Exportable:
    use = main_use(stored, "export", path)
    if use == "apply":
        return restoring(make_image_model(stored, path))
    trained = open_trained(stored, path)
    return generating(trained) if use == "sample" else classifying(trained, path)


def _write(exportable: Exportable, path: Path) -> None:
    import onnx

    with _quietly():
        torch.onnx.export(
            exportable.module,
            tuple(exportable.example.values()),
            str(path),
            input_names=list(exportable.example),
            output_names=list(exportable.outputs),
            dynamic_shapes=exportable.shapes,
            opset_version=OPSET,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    if exportable.notes:
        model = onnx.load(path)
        onnx.helper.set_model_props(model, {name: json.dumps(value) for name, value in exportable.notes.items()})
        onnx.save(model, path)


@contextlib.contextmanager
def _quietly() -> Any:
    """Without the exporter's progress report, which is for those who work on it."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _largest_difference(exportable: Exportable, file: Path, origin: str) -> float:
    """Between the file's results and PyTorch's, at sizes that were not traced."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    worst = 0.0
    for inputs in exportable.checks:
        with torch.no_grad():
            wanted = exportable.module(*inputs.values())
        made = session.run(list(exportable.outputs), {name: tensor.numpy() for name, tensor in inputs.items()})
        for one, other in zip(made, wanted, strict=True):
            if not other.isfinite().all():
                raise UserError(f"{origin}: its network gives numbers that are not finite; the weights may be damaged")
            worst = float(np.maximum(worst, np.abs(one - other.numpy()).max()))  # max() would lose what is no number
    return worst
