"""`paceline export`: what a run learned as an ONNX file for pictures of any size, checked against PyTorch."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.engine.restorer import Restorer, open_restorer
from paceline.errors import UserError

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
OPSET = 20
TOLERANCE = 1e-4  # of values in -1…1: a fiftieth of a level of 255
CHECKED_PX = ((96, 128), (160, 96))  # besides the size that is traced; as multiples where networks need them


def export(path: str, out: str, checkpoint: str) -> int:
    """Writes the file, runs it, and says how far its results are from PyTorch's."""
    target = Path(out).expanduser()
    if target.suffix != ".onnx":
        raise UserError(f"--out {out}: expected a name that ends in .onnx")
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"export needs {', '.join(missing)}: pip install 'paceline[export]'")
    restorer = open_restorer(path, checkpoint)
    multiple = restorer.field.multiple_px
    beside = target.with_name(f"{target.name}.writing")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _write(restorer, beside, multiple)
        worst = _largest_difference(restorer, beside, multiple)
        if worst > TOLERANCE:
            raise UserError(f"--out {out}: not written, since its results differ from PyTorch's by {worst:.1e}")
        beside.rename(target)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}") from None
    finally:
        beside.unlink(missing_ok=True)
    sides = f"sides that are multiples of {multiple}" if multiple > 1 else "any size"
    names = ", ".join(restorer.results)
    print(f"{restorer.config.recipe_name} from {restorer.origin} → {target} ({target.stat().st_size / 1e6:.1f} MB)")
    print(f"input `pictures` [n, {restorer.facts.channels}, height, width] in -1…1, {sides}; output {names}, in -1…1")
    print(f"largest difference from PyTorch, at {len(CHECKED_PX)} other sizes: {worst:.1e}")
    return 0


class _Restore(nn.Module):
    """`restore` as the one thing that a module does, with its results in order."""

    def __init__(self, restorer: Restorer) -> None:
        super().__init__()
        self.recipe = restorer.recipe

    def forward(self, pictures: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.recipe.restore(pictures).values())


def _write(restorer: Restorer, path: Path, multiple: int) -> None:
    side = max(multiple, 64 // multiple * multiple) * 2
    example = torch.zeros(2, restorer.facts.channels, side, side)
    dims = {name: torch.export.Dim(name, min=1, max=2**16 // multiple) for name in ("height", "width")}
    scaled = [dim if multiple == 1 else multiple * dim for dim in dims.values()]
    shapes: dict[int, Any] = {0: torch.export.Dim("n"), 2: scaled[0], 3: scaled[1]}
    with _quietly():
        torch.onnx.export(
            _Restore(restorer),
            (example,),
            str(path),
            input_names=["pictures"],
            output_names=list(restorer.results),
            dynamic_shapes=(shapes,),
            opset_version=OPSET,
            dynamo=True,
            external_data=False,
            verbose=False,
        )


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


def _largest_difference(restorer: Restorer, path: Path, multiple: int) -> float:
    """Between the file's results and PyTorch's, on noise of several sizes."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for height, width in CHECKED_PX:
        size = [max(multiple, side // multiple * multiple) * (1 + (multiple > side)) for side in (height, width)]
        pictures = torch.rand(1, restorer.facts.channels, *size, generator=generator) * 2 - 1
        with torch.no_grad():
            wanted = restorer.recipe.restore(pictures)
        made = session.run(list(wanted), {"pictures": pictures.numpy()})
        for one, other in zip(made, wanted.values(), strict=True):
            worst = max(worst, float(np.abs(one - other.numpy()).max()))
    return worst
