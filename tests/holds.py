"""Hold a run of the recipe `tiny` at a chosen point, so that a test does not depend on the speed of the run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

from running import Running, start_function_in_ranks, wait_until

from paceline.data.loader import StepData

Kind = Literal["loss", "prediction", "save"]


class Holds:
    """A folder of files: while it has a file `loss`, `prediction` or `save`, every one of these waits in every process.

    Pass `settings` to the command. The folder, and with it the settings, can be the same for several runs.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.settings = ("--set", f"holds={folder}")

    def hold(self, kind: Kind, after: int = 0) -> None:
        """Hold every process in its next save, or in the loss or prediction after the first `after` of them."""
        self._forget(kind)  # a process may have left a mark just after the last release
        (self.folder / kind).write_text(str(after))

    def num_held(self, kind: Kind) -> int:
        return len(list(self.folder.glob(f"{kind}-waits-*")))

    def wait_for(self, kind: Kind, running: Running, num_ranks: int = 1) -> None:
        """Wait until this many processes are held."""
        wait_until(lambda: self.num_held(kind) >= num_ranks, running)

    def release(self, kind: Kind) -> None:
        (self.folder / kind).unlink()
        self._forget(kind)

    def _forget(self, kind: Kind) -> None:
        for mark in self.folder.glob(f"{kind}-waits-*"):
            mark.unlink()


def start_until(folder: Path, size: int, images: int, *arguments: str) -> list[Running]:
    """Start `paceline ARGUMENTS` in several ranks; they wait, until they are killed, before the step at `images`."""
    return start_function_in_ranks(folder, size, _train_until, images, arguments)


def _train_until(images: int, arguments: tuple[str, ...]) -> int:
    from paceline.cli.app import run
    from paceline.training.loop import Loop

    advance = Loop.advance

    def wait_or_advance(loop: Loop, data: StepData) -> None:
        while data.images >= images:
            time.sleep(0.01)
        advance(loop, data)

    Loop.advance = wait_or_advance  # type: ignore[method-assign]
    return run(list(arguments))
