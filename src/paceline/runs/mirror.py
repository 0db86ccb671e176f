"""Apply `--mirror` and `--resume-from`: a thread copies the run folder, from consistent copies of its files."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from paceline.config.files import identity
from paceline.config.resolve import Config
from paceline.core.errors import UserError
from paceline.core.files import checksum_of_file
from paceline.core.terminal import activity
from paceline.core.text import one_line, print_line, redact
from paceline.core.watch import beat
from paceline.data.fingerprint import without_sizes
from paceline.runs.checkpoint import NAME, is_whole
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import SAMPLE_NAME, SAMPLES
from paceline.runs.published import (
    CHANGING,
    CHECKPOINT_FILE,
    CHECKPOINTS,
    OBJECTS,
    Destination,
    Manifest,
    Piece,
    fetch_config,
    list_manifests,
    manifest_name,
    order_of,
    read_manifest,
    restore,
)
from paceline.runs.record import RunRecord, read_record
from paceline.runs.status import STATUS, MirrorState
from paceline.runs.terminal import LOGS

STAGING = ".mirror"
PART_LENGTH = 2**16  # number of characters to redact at a time
MAX_LINE_LENGTH = 2**24


class Staging:
    """A hidden folder in the run folder that holds files until they are sent."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / STAGING
        self._digests: dict[tuple[str, int, int, int], str] = {}

    def take(self) -> dict[str, Path]:
        """Copy a snapshot of the run, except its samples, to the hidden folder; return all of its files by name."""
        self.clear()
        for images in self.checkpoints():
            name = f"{CHECKPOINTS}/{images:012d}"
            _link_all(self.folder / name, self.path / name)
        for name in CHANGING:  # copied after the checkpoints, so that no metrics are missing
            self.copy(name)
        staged = {file.relative_to(self.path).as_posix(): file for file in self.path.rglob("*") if file.is_file()}
        samples = {f"{SAMPLES}/{file.name}": file for file in self._samples()}
        return dict(sorted((staged | samples).items()))

    def copy(self, name: str) -> Path | None:
        """Copy a file that may still grow, and return the copy; None if there is no such file."""
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(self.folder / name, target)
        except FileNotFoundError:
            return None
        if target.parent.name == LOGS:  # a library may have printed a credential
            _redact_file(target)
        return target

    def describe(self, files: dict[str, Path]) -> dict[str, Piece]:
        """Return the manifest entry for each file; an unchanged file is not read again."""
        digests: dict[tuple[str, int, int, int], str] = {}
        pieces: dict[str, Piece] = {}
        for name, file in files.items():
            found = file.stat()
            key = (name, found.st_ino, found.st_mtime_ns, found.st_size)
            digests[key] = digest = self._digests.get(key) or checksum_of_file(file)
            pieces[name] = Piece(f"{OBJECTS}/{digest}" if name in CHANGING else name, digest, found.st_size)
        self._digests = digests
        return pieces

    def clear(self) -> None:
        """Remove the hidden folder."""
        shutil.rmtree(self.path, ignore_errors=True)

    def checkpoints(self, folder: Path | None = None) -> list[int]:
        """Return the number of images seen at each checkpoint, by default in the run folder."""
        entries = ((folder or self.folder) / CHECKPOINTS).glob("*")
        return sorted(int(entry.name) for entry in entries if NAME.fullmatch(entry.name))

    def live_files(self) -> Iterator[Path]:
        """Yield the files that users look at during training."""
        yield from (self.folder / name for name in (*CHANGING, STATUS) if (self.folder / name).exists())
        yield from sorted((self.folder / LOGS).glob("rank-*.txt"))
        yield from self._samples()

    def _samples(self) -> list[Path]:
        return sorted(file for file in (self.folder / SAMPLES).glob("*") if SAMPLE_NAME.fullmatch(file.name))


def _redact_file(file: Path) -> None:
    """Hide credentials in a file chunk by chunk, so that a long log does not fill memory or delay training."""
    redacted, part, length = file.with_name(f"{file.name}.redacted"), [""], 0
    with (
        file.open(encoding="utf-8", errors="backslashreplace", newline="") as original,
        redacted.open("w", encoding="utf-8", newline="") as copy,
    ):
        while line := original.readline(MAX_LINE_LENGTH):
            part.append(line)
            length += len(line)
            if length >= PART_LENGTH and not line.rstrip().endswith((":", "=")):  # keeps names and values together
                copy.write(redact("".join(part)))
                part, length = [], 0
        copy.write(redact("".join(part)))
    redacted.replace(file)


def _link_all(source: Path, target: Path) -> None:
    """Hard-link a folder's files into a new folder, but not if the source is being removed or replaced."""
    target.mkdir(parents=True)
    try:
        before = source.stat().st_ino
        for file in source.iterdir():
            _link(file, target / file.name)
        if source.stat().st_ino == before:  # otherwise, the folder was replaced in the meantime
            return
    except FileNotFoundError:
        pass
    shutil.rmtree(target)


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except FileNotFoundError:
        raise
    except OSError:  # the file system does not support hard links
        shutil.copyfile(file, target)


NUM_KEPT_MANIFESTS = 2  # snapshots to keep, each at a different number of images
RESPONSE_SECONDS = 10.0  # how long a starting run waits for its mirror
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 60.0  # first and longest pause before a retry
MAX_FINAL_PAUSE_SECONDS = 2.0
SECONDS_AFTER_STOP = 3.0  # how long a stopping run waits for a mirror whose last upload failed
MAX_TIME_SHARE = 0.2  # maximum fraction of time spent on updates


class Mirror:
    """Copies one run folder to its mirror; used by the process that writes to the folder."""

    def __init__(self, folder: Path, destination: Destination, url: str, run: str, every: float) -> None:
        """Start the thread; `run` identifies the run, and `every` is the number of seconds between updates."""
        self.folder, self.destination, self.url, self.run, self.every = folder, destination, redact(url), run, every
        self._state = MirrorState(self.url)
        self._written: MirrorState | None = None
        self._staging = Staging(folder)
        self._first_images = max(self._staging.checkpoints(), default=0)
        self._sent: dict[str, str] = {}  # SHA-256 of each file at the destination
        self._sent_stat: dict[str, tuple[int, int]] = {}  # modification time and size of each file when it was sent
        self._manifests: dict[str, Manifest] = {}  # published manifests by name, newest first
        self._connected = self._cancelled = False
        self._rejected = ""
        self._answered, self._started = threading.Event(), threading.Event()
        self._wake, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="mirror", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise UserError if the mirror contains another run or is ahead of the folder.

        If the mirror does not answer in time, this check is skipped.
        """
        self._answered.wait(RESPONSE_SECONDS)
        if self._rejected:
            raise UserError(self._rejected)

    def begin(self) -> None:
        """Start copying the run folder."""
        self._started.set()

    def notify(self) -> None:
        """Notify the thread of a new checkpoint."""
        self._wake.set()

    @property
    def is_complete(self) -> bool:
        """Whether all files were sent before the run ended."""
        return self._ended.is_set() and not self._thread.is_alive() and not self._rejected

    def finish(self, seconds: float, is_stopping: Callable[[], bool] = lambda: False) -> str:
        """Wait until all files are sent or `seconds` have passed; return a line that reports the result.

        After a stop request, an upload that has failed gets only a few more seconds. If the run has not started, the
        thread ends without sending anything, and the line is empty.
        """
        self._cancelled = not self._started.is_set()
        for event in (self._ended, self._started, self._wake):
            event.set()
        if self._cancelled:
            return ""
        until = time.monotonic() + seconds
        while self._thread.is_alive() and time.monotonic() < until:
            self._thread.join(0.1)
            beat()
            if is_stopping() and self._state.error:
                until = min(until, time.monotonic() + SECONDS_AFTER_STOP)
        if self._rejected:
            return self._rejected
        if self.is_complete:
            return f"mirror: {self.url} is complete"
        newest = max(self._staging.checkpoints(), default=0)
        is_behind = newest > self._state.images
        missing = f"the checkpoint at {newest:,} images is" if is_behind else "the latest metrics and logs are"
        reason = f" ({self._state.error})" if self._state.error else ""
        return (
            f"mirror: {self.url} is not complete: {missing} missing{reason}; run the same command again to complete it"
        )

    def _follow(self) -> None:
        """Update the mirror repeatedly and retry after failures; runs in the thread."""
        error, pause = self._attempt(self._connect), FIRST_PAUSE_SECONDS
        self._answered.set()
        self._started.wait()  # the log is open only once the run has started
        while not self._cancelled:
            if error:
                self._report_error(error)
                if self._rejected:
                    return
                if self._ended.is_set():
                    time.sleep(min(pause, MAX_FINAL_PAUSE_SECONDS))
                else:
                    self._ended.wait(min(pause, MAX_PAUSE_SECONDS))
                pause *= 2
            ending, began = self._ended.is_set(), time.monotonic()
            self._wake.clear()
            error = self._attempt(lambda ending=ending: self._update(ending))  # type: ignore[misc]
            if not error:
                self._report_error("")
                pause = FIRST_PAUSE_SECONDS
                if ending:
                    return
                if not self._ended.is_set():
                    self._wake.wait(max(self.every, (time.monotonic() - began) / MAX_TIME_SHARE))

    def _attempt(self, call: Callable[[], None]) -> str:
        """Return why a call failed, or an empty string; a UserError means that the mirror cannot be used."""
        try:
            call()
        except UserError as rejection:
            self._rejected = str(rejection)
            return self._rejected
        except Exception as error:  # storage libraries may raise any exception
            return one_line(error)
        return ""

    def _report_error(self, error: str) -> None:
        if error and not self._state.error:
            again = "; training continues and the upload is retried" if not self._rejected else ""
            print_line(f"mirror: upload to {self.url} failed ({error}){again}")
        elif not error and self._state.error:
            print_line(f"mirror: {self.url} is reachable again")
        self._set_state(replace(self._state, error=error))

    def _set_state(self, state: MirrorState) -> None:
        self._state = state
        if state != self._written and self._started.is_set():
            with suppress(OSError):  # a full disk is reported when a checkpoint is saved
                state.write(self.folder)
            self._written = state

    def _connect(self) -> None:
        """Read the published manifests; raise UserError if they are from another run or ahead of this folder."""
        if self._connected:
            return
        self._manifests = {}
        for name in list_manifests(self.destination):
            try:
                manifest = read_manifest(self.destination, name)
            except UserError as error:
                raise UserError(f"--mirror {self.url}: {error}") from None
            except ValueError:  # readers ignore a damaged manifest
                continue
            if manifest.run != self.run:
                raise UserError(f"--mirror {self.url}: contains another run: choose a different URL")
            if manifest.images > self._first_images:
                raise UserError(
                    f"--mirror {self.url}: contains this run at {manifest.images:,} images, "
                    f"but --out is at {self._first_images:,}; "
                    f"use --resume-from {self.url} to resume from the mirror"
                )
            self._manifests[name] = manifest
            for piece in manifest.files.values():
                self._sent.setdefault(piece.object, piece.sha256)
        newest = next(iter(self._manifests.values()), None)
        if newest:
            self._set_state(replace(self._state, images=newest.images, since=time.time()))
        self._connected = True

    def _update(self, ending: bool) -> None:
        """Send all new and changed files, starting with a new checkpoint."""
        self._connect()
        newest = next(iter(self._manifests.values()), None)
        files = newest.files if newest else ()
        published = {int(name.split("/")[1]) for name in files if CHECKPOINT_FILE.fullmatch(name)}
        if ending or set(self._staging.checkpoints()) != published:
            self._publish(newest)
        for file in self._staging.live_files():
            self._send_live(file)
        self._staging.clear()

    def _publish(self, newest: Manifest | None) -> None:
        """Publish the folder as a snapshot: send its files, then the manifest, then remove old snapshots."""
        files = self._staging.take()
        images = max(self._staging.checkpoints(self._staging.path), default=0)
        if not images:
            return
        pieces = self._staging.describe(files)
        manifest = Manifest(self.run, images, pieces)
        if manifest == newest:
            return
        self._unpublish_differing(pieces)
        for name, piece in pieces.items():
            self._send(files[name], piece)
        self._check_complete(manifest)
        serials = [order_of(name)[1] for name, one in self._manifests.items() if one.images == images]
        name = manifest_name(images, max(serials, default=0) + 1)
        file = self._staging.path / "manifest.json"
        file.write_bytes(manifest.encode())
        self.destination.send(file, name)
        self._manifests = {name: manifest} | self._manifests
        self._set_state(replace(self._state, images=images, since=time.time()))
        self._prune()

    def _send(self, file: Path, piece: Piece) -> None:
        if self._sent.get(piece.object) != piece.sha256:
            self.destination.send(file, piece.object)
            self._sent[piece.object] = piece.sha256

    def _unpublish_differing(self, pieces: Mapping[str, Piece]) -> None:
        """Remove the manifests that list a file whose content is about to change."""
        new = {piece.object: piece.sha256 for piece in pieces.values() if piece.object.startswith(CHECKPOINTS)}
        for name, manifest in list(self._manifests.items()):
            if any(new.get(one.object, one.sha256) != one.sha256 for one in manifest.files.values()):
                self.destination.remove(name)
                del self._manifests[name]

    def _check_complete(self, manifest: Manifest) -> None:
        """Raise OSError, which triggers a retry, if a file at the destination is missing or has the wrong size."""
        there = self.destination.sizes(CHECKPOINTS, OBJECTS, SAMPLES)
        lost = [piece.object for piece in manifest.files.values() if there.get(piece.object) != piece.size]
        for one in lost:
            self._sent.pop(one, None)
        if lost:
            raise OSError(f"{lost[0]} is missing or truncated (files affected: {len(lost)})")

    def _prune(self) -> None:
        """Remove old manifests, then the files that no remaining manifest lists."""
        kept: list[int] = []
        for name, manifest in list(self._manifests.items()):
            if manifest.images not in kept and len(kept) < NUM_KEPT_MANIFESTS:
                kept.append(manifest.images)
                continue
            self.destination.remove(name)
            del self._manifests[name]
        named = {piece.object for manifest in self._manifests.values() for piece in manifest.files.values()}
        for one in self.destination.sizes(CHECKPOINTS, OBJECTS):
            if one not in named:
                self.destination.remove(one)
                self._sent.pop(one, None)

    def _send_live(self, file: Path) -> None:
        """Send a file under its own name if it has changed."""
        name = file.relative_to(self.folder).as_posix()
        found = file.stat()
        if self._sent_stat.get(name) == (found.st_mtime_ns, found.st_size):
            return
        copy = self._staging.copy(name)
        if copy:
            self._send(copy, Piece(name, checksum_of_file(copy), copy.stat().st_size))
            self._sent_stat[name] = (found.st_mtime_ns, found.st_size)


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
        if mirror is None:
            return True
        line = mirror.finish(min(self.settings.mirror_wait, self.settings.timeout / 2, at_most), is_stopping)
        if line:
            print_line(line)
        return mirror.is_complete or not line
