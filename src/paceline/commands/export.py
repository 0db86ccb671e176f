"""`paceline export`: export a trained model to ONNX and compare its results with PyTorch's."""

from __future__ import annotations

import importlib.util

from paceline.core.errors import UserError, install_extra
from paceline.core.files import check_new_file, new_file
from paceline.core.terminal import activity
from paceline.core.text import print_line
from paceline.inference.export import explaining_failures, largest_difference, make_exportable, write_onnx
from paceline.inference.trained import NO_BLEND, Blend, read_blended
from paceline.runs.finished_run import last_finished

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-4  # largest allowed difference for values in [-1, 1]; about 1/78 of an 8-bit level


def export(path: str, out: str, checkpoint: str, *, overwrite: bool = False, blend: Blend = NO_BLEND) -> int:
    """Write the ONNX file, run the exported model, and print how much its results differ from PyTorch's."""
    target = check_new_file(out, (".onnx",), overwrite=overwrite)
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"export needs {', '.join(missing)}; install with: {install_extra('export')}")
    path = last_finished(path)
    stored = read_blended(path, checkpoint, blend)
    exportable = make_exportable(stored, path)
    with new_file(target) as temporary, explaining_failures(path):
        activity("exporting the network to ONNX")
        write_onnx(exportable, temporary)
        activity("comparing the ONNX model's results with PyTorch's")
        difference = largest_difference(exportable, temporary, path)
        if not difference <= TOLERANCE:
            raise UserError(
                f"--out {out}: not written, because the exported model's results differ from PyTorch's by "
                f"{difference:.1e}, which is more than the allowed {TOLERANCE:.0e}"
            )
    print_line(f"{stored.config.recipe_name} from {stored.origin} → {target} ({target.stat().st_size / 1e6:.1f} MB)")
    print_line(exportable.usage)
    print_line(f"largest difference from PyTorch: {difference:.1e}")
    return 0
