"""Writes an ONNX file, and compares its results with PyTorch's."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from paceline.core.errors import UserError, place_outside
from paceline.inference.exportable import Exportable

OPSET = 20
LIBRARIES = tuple(  # the folders of torch, Paceline and Python's own modules
    f"{folder}/"
    for folder in (Path(torch.__file__).parent, Path(__file__).parents[1], Path(contextlib.__file__).parent)
)


def write_onnx(exportable: Exportable, path: Path) -> None:
    """Trace a module and write it with its metadata."""
    import onnx

    with _quiet():
        torch.onnx.export(
            exportable.module,
            tuple(exportable.example.values()),
            str(path),
            input_names=list(exportable.example),
            output_names=list(exportable.outputs),
            dynamic_shapes=exportable.dynamic_shapes,
            opset_version=OPSET,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    if exportable.metadata:
        model = onnx.load(path)
        onnx.helper.set_model_props(model, {name: json.dumps(value) for name, value in exportable.metadata.items()})
        onnx.save(model, path)


def largest_difference(exportable: Exportable, file: Path, origin: str) -> float:
    """Return the largest difference between the ONNX file's results and PyTorch's, at new image sizes."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # it contacts a server and leaves a temporary file
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    worst = 0.0
    for inputs in exportable.checks:
        with torch.no_grad():
            expected = exportable.module(*inputs.values())
        made = session.run(list(exportable.outputs), {name: tensor.numpy() for name, tensor in inputs.items()})
        for one, other in zip(made, expected, strict=True):
            if not other.isfinite().all():
                raise UserError(f"{origin}: the network's output is not finite; the weights may be damaged")
            worst = float(np.maximum(worst, np.abs(one - other.numpy()).max()))  # the built-in max() could drop a NaN
    return worst


@contextlib.contextmanager
def explaining_failures(origin: str) -> Iterator[None]:
    """Replace an exception from exporting or running a network with a one-line UserError with the line of code."""
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:
        cause = error.__cause__ or error  # the exporter hides the cause behind a page of advice
        where = place_outside(cause, LIBRARIES)
        problem = (str(cause).strip().splitlines() or [""])[0]
        raise UserError(
            f"{origin}: the network cannot be exported to ONNX{where}: {type(cause).__name__}: {problem}"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporter's progress reports and graphs, which are meant for its developers."""
    before, unread = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(unread), contextlib.redirect_stderr(unread):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
