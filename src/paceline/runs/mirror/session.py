"""Apply `--mirror` and `--resume-from` in the process that writes to the run folder."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path

from paceline.config.files import identity
from paceline.config.resolve import Config
from paceline.core.errors import UserError
from paceline.core.terminal import activity
from paceline.core.text import one_line, print_line
from paceline.core.watch import beat
from paceline.data.fingerprint import without_sizes
from paceline.runs.checkpoint import is_whole
from paceline.runs.folder import RunFolder
from paceline.runs.mirror.mirror import Mirror, Staging
from paceline.runs.mirror.published import Destination, fetch_config, restore
from paceline.runs.record import RunRecord, read_record


def published_record(url: str) -> RunRecord | None:
    """Return the settings of the run at `--resume-from`, before it is restored; None if they cannot be read."""
    try:
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
            destination = Destination(url, "--resume-from")
            activity(f"reading the settings of the run at {url}")
            fetch_config(destination, Path(folder))
            return read_record(Path(folder))
    except Exception:  # `Mirroring.prepare` reads the same files later and reports the error
        return None


class Mirroring:
    """Restores and mirrors a run on rank 0; does nothing if neither `--mirror` nor `--resume-from` is set."""

    def __init__(self, config: Config, folder: RunFolder, is_first: bool) -> None:
        self.is_first = is_first
        self.config, self.folder, self.settings = config, folder, config.run
        self._mirror: Mirror | None = None
        self._started = False

    def prepare(self, data: str) -> None:
        """Restore the run if the copy at `--resume-from` is newer, and open the mirror.

        Raise UserError if the mirror contains another run.
        """
        self.folder.check_settings(self.config, data)
        if not self.is_first:
            return
        Staging(self.folder.path).clear()  # removes the leftovers of a killed run
        if self.settings.resume_from:
            self._restore()
            self.folder.check_settings(self.config, data)
        if self.settings.mirror:
            url = self.settings.mirror
            destination = Destination(url, "--mirror")
            run = identity(self.config, without_sizes(data))
            self._mirror = Mirror(self.folder.path, destination, url, run, self.settings.mirror_every)
            self._mirror.check()

    def _restore(self) -> None:
        url, checkpoints = self.settings.resume_from, self.folder.checkpoints
        source = Destination(url, "--resume-from")
        here = next((images for images in reversed(checkpoints.all()) if is_whole(checkpoints.path(images))), 0)
        try:
            found = restore(source, self.folder.path, here, print_line, beat)
        except UserError as error:
            raise UserError(f"--resume-from {url}: {error}") from None
        except Exception as error:  # storage libraries may raise any exception
            if not here:
                raise UserError(f"--resume-from {url}: cannot be read ({one_line(error)}): check the URL") from None
            print_line(f"--resume-from {url}: cannot be read ({one_line(error)}); resuming from --out")
            return
        if found is None and not here and url != self.settings.mirror:
            raise UserError(f"--resume-from {url}: contains no snapshot of a run: check the URL")
        if found is None:
            print_line(f"--resume-from {url}: contains no run yet; using --out")
        elif found > here:
            print_line(f"restored the run at {found:,} images from {url}")

    def begin(self) -> None:
        """Start copying to the mirror; called once the run's own files are written."""
        if self._mirror:
            self._started = True
            self._mirror.begin()

    def notify(self) -> None:
        """Notify the mirror of a new checkpoint."""
        if self._mirror:
            self._mirror.notify()

    def finish(self, at_most: float = math.inf, is_stopping: Callable[[], bool] = lambda: False) -> bool:
        """Wait for the mirror within the time limit and print the result; return whether nothing is missing.

        A second call does nothing.
        """
        mirror, self._mirror = self._mirror, None
        if mirror and self._started:
            seconds = min(self.settings.mirror_wait, self.settings.timeout / 2, at_most)
            print_line(mirror.finish(seconds, is_stopping))
            return mirror.is_complete
        if mirror:
            mirror.cancel()
        return True
