"""TensorBoard event files in the run folder: view them with `tensorboard --logdir RUN`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from paceline.runs.logger import Logger, Pixels

FOLDER = "tensorboard"
SAMPLES = "samples"  # TensorBoard's group for sample images
MAX_QUEUE = 1000  # number of events; with a shorter queue, `write` would wait for the disk
FLUSH_SECONDS = 30


class TensorBoard(Logger):
    """Writes scalars and images as TensorBoard events."""

    package = "torch.utils.tensorboard"

    def __init__(self, folder: Path, images: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # imported here because the import takes about a second

        if getattr(threading.excepthook, "func", None) is not _print_other_errors:
            threading.excepthook = partial(_print_other_errors, threading.excepthook)
        # From this step on, TensorBoard hides events from earlier files.
        first_step = images + 1 if images else 0
        self._events = SummaryWriter(
            str(folder / FOLDER), purge_step=first_step, max_queue=MAX_QUEUE, flush_secs=FLUSH_SECONDS
        )

    def write(self, images: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._events.add_scalar(name, value, images)

    def image(self, name: str, images: int, pixels: Pixels) -> None:
        self._events.add_image(f"{SAMPLES}/{name}", pixels, images, dataformats="HWC")

    def flush(self) -> None:
        self._events.flush()

    def close(self) -> None:
        self._events.close()


def _print_other_errors(
    print_error: Callable[[threading.ExceptHookArgs], object], failed: threading.ExceptHookArgs
) -> None:
    """Print the traceback of a failed thread, unless it is TensorBoard's own: `write` and `flush` raise that error."""
    if not type(failed.thread).__module__.startswith("tensorboard."):
        print_error(failed)
