"""A run's folder, copied elsewhere by one thread while it trains.

Two things are kept there. What a person wants to see now (metrics, samples, settings, status, logs) lies under its own
name and is replaced as it changes. What a run can go on from is published: see `published`. A step never waits for
either. What goes wrong is tried again, later and later; the log says it once and then seldom, mirror.json always.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from paceline.core.checksums import checksum_of_file
from paceline.core.errors import UserError
from paceline.core.secrets import one_line, redact
from paceline.runs.metrics import SAMPLES
from paceline.runs.mirror.destination import Destination
from paceline.runs.mirror.published import (
    CHECKPOINTS,
    OBJECTS,
    Manifest,
    Piece,
    list_manifests,
    manifest_name,
    order_of,
    read_manifest,
)
from paceline.runs.mirror.staging import Staging
from paceline.runs.status import MirrorState

KEPT_MANIFESTS = 2  # each of another number of images
SECONDS_TO_ANSWER = 10.0  # that a start waits to hear whose mirror it is
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0  # before trying again
LONGEST_PAUSE_AT_THE_END_SECONDS = 2.0
FIRST_REMINDER_SECONDS = 600.0  # before the log says again that it does not work; then twice as long, and so on
SHARE_OF_TIME = 0.2  # that sending what grows may take


class Mirror:
    """Follows one folder for its one writer."""

    def __init__(self, folder: Path, destination: Destination, url: str, run: str, every: float) -> None:
        """`run` tells this run from any other, `every` are the seconds between two looks."""
        self.folder, self.destination, self.url, self.run, self.every = folder, destination, redact(url), run, every
        self._state = MirrorState(self.url)
        self._written: MirrorState | None = None
        self._staging = Staging(folder)
        self._began_at = max(self._staging.checkpoints(), default=0)
        self._up: dict[str, str] = {}  # the SHA-256 of what lies there
        self._spec: dict[str, tuple[int, int]] = {}  # time and size of a file when it was sent
        self._manifests: dict[str, Manifest] = {}  # published, by name, newest first
        self._connected = False
        self._refused = ""
        self._answered, self._begun, self._wake = threading.Event(), threading.Event(), threading.Event()
        self._ending = self._left = False
        self._silent_until, self._reminder = 0.0, FIRST_REMINDER_SECONDS
        self._thread = threading.Thread(target=self._follow, name="mirror", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Refuses a mirror that holds another run, or more of this one than the folder, if it answers in time."""
        self._answered.wait(SECONDS_TO_ANSWER)
        if self._refused:
            raise UserError(self._refused)

    def begin(self) -> None:
        """Lets the copying begin."""
        self._begun.set()

    def leave(self) -> None:
        """Ends it where the run has not begun."""
        self._left = True
        self._begun.set()

    def notice(self) -> None:
        """Says that there is a new checkpoint."""
        self._wake.set()

    def finish(self, seconds: float, beat: Callable[[], None] = lambda: None) -> str:
        """Waits until all is there, for so many seconds at most; says how far it came."""
        self._ending = True
        self._begun.set()
        self._wake.set()
        until = time.monotonic() + seconds
        while self._thread.is_alive() and time.monotonic() < until:
            self._thread.join(0.1)
            beat()
        if self._refused:
            return self._refused
        if not self._thread.is_alive():
            return f"mirror: all is at {self.url}"
        missing = ", ".join(self._missing())
        why = f" ({self._state.trouble})" if self._state.trouble else ""
        return f"mirror: not all is at {self.url}: {missing} missing{why}; the same command brings it there"

    def _missing(self) -> list[str]:
        newest = max(self._staging.checkpoints(), default=0)
        behind = [f"the checkpoint at {newest:,} images is"] if newest > self._state.images else []
        return behind or ["the last metrics and logs are"]

    def _follow(self) -> None:
        """The thread: looks, sends, and tries again what did not work."""
        pause = FIRST_PAUSE_SECONDS
        while not (self._refused or self._left):
            ending, began = self._ending, time.monotonic()
            self._wake.clear()
            try:
                self._connect()
                self._answered.set()
                self._begun.wait()
                if self._left:
                    return
                self._bring_up(ending)
                self._note_trouble("")
                pause = FIRST_PAUSE_SECONDS
                if ending:
                    return
                if not self._ending:
                    self._wake.wait(max(self.every, (time.monotonic() - began) / SHARE_OF_TIME))
            except UserError as refusal:
                self._refused = str(refusal)
                self._answered.set()
                self._begun.wait()
                self._note_trouble(self._refused)
            except Exception as error:  # whatever a storage raises
                self._answered.set()
                self._begun.wait()  # until then there is no log to say it in
                self._note_trouble(one_line(error))
                longest = LONGEST_PAUSE_AT_THE_END_SECONDS if self._ending else LONGEST_PAUSE_SECONDS
                self._rest(min(pause, longest))
                pause *= 2

    def _rest(self, seconds: float) -> None:
        """Waits before another try; the end of the run cuts it short."""
        ending, until = self._ending, time.monotonic() + seconds
        while time.monotonic() < until and self._ending == ending:
            time.sleep(0.05)

    def _note_trouble(self, trouble: str) -> None:
        if self._left:
            return
        now = time.monotonic()
        if trouble and now >= self._silent_until:
            again = "; training goes on, and so does trying" if not self._refused else ""
            print(f"mirror: {self.url} does not work ({trouble}){again}", flush=True)
            self._silent_until, self._reminder = now + self._reminder, 2 * self._reminder
        elif not trouble and self._state.trouble:
            print(f"mirror: {self.url} works again", flush=True)
        self._set_state(replace(self._state, trouble=trouble))

    def _set_state(self, state: MirrorState) -> None:
        self._state = state
        if state != self._written and self._begun.is_set():
            with suppress(OSError):  # a full disk is for those to say who need what they write
                state.write(self.folder)
            self._written = state

    def _connect(self) -> None:
        """Learns what is published; never replaces what another run, or this one when it was further, published."""
        if self._connected:
            return
        self._manifests = {}
        for name in list_manifests(self.destination):
            try:
                manifest = read_manifest(self.destination, name)
            except ValueError:  # not whole: nobody trusts it
                continue
            if manifest.run != self.run:
                raise UserError(f"--mirror {self.url}: holds another run; choose another place")
            if manifest.images > self._began_at:
                raise UserError(
                    f"--mirror {self.url}: holds this run at {manifest.images:,} images, --out at {self._began_at:,}; "
                    f"--resume-from {self.url} goes on from there"
                )
            self._manifests[name] = manifest
            for piece in manifest.files.values():
                self._up.setdefault(piece.object, piece.sha256)
        newest = next(iter(self._manifests.values()), None)
        if newest:
            self._set_state(replace(self._state, images=newest.images, since=time.time()))
        self._connected = True

    def _bring_up(self, ending: bool) -> None:
        """Sends what is new; a new checkpoint first."""
        newest = next(iter(self._manifests.values()), None)
        if ending or self._staging.checkpoints() != _checkpoints_in(newest):
            self._publish(newest)
        for file in self._staging.live_files():
            self._send_live(file)
        self._staging.clear()

    def _publish(self, newest: Manifest | None) -> None:
        """Makes the folder as it is now one snapshot there: its files, then their manifest, then less of the old."""
        files = self._staging.take()
        images = max(self._staging.staged_checkpoints(), default=0)
        if not images:
            return
        pieces = self._staging.describe(files)
        manifest = Manifest(self.run, images, pieces)
        if manifest == newest:
            return
        self._unpublish_what_differs(pieces)
        for name, piece in pieces.items():
            self._send(files[name], piece)
        self._look_whether_all_is_there(manifest)
        serials = [order_of(name)[1] for name, one in self._manifests.items() if one.images == images]
        name = manifest_name(images, max(serials, default=0) + 1)
        file = self._staging.path / "manifest.json"
        file.write_bytes(manifest.encode())
        self.destination.send(file, name)
        self._manifests = {name: manifest} | self._manifests
        self._set_state(replace(self._state, images=images, since=time.time()))
        self._prune()

    def _send(self, file: Path, piece: Piece) -> None:
        if self._up.get(piece.object) != piece.sha256:
            self.destination.send(file, piece.object)
            self._up[piece.object] = piece.sha256

    def _unpublish_what_differs(self, pieces: dict[str, Piece]) -> None:
        """Takes back manifests that name an object which is about to be replaced by another of its name."""
        wanted = {piece.object: piece.sha256 for piece in pieces.values() if piece.object.startswith(CHECKPOINTS)}
        for name, manifest in list(self._manifests.items()):
            if any(wanted.get(one.object, one.sha256) != one.sha256 for one in manifest.files.values()):
                self.destination.remove(name)
                del self._manifests[name]

    def _look_whether_all_is_there(self, manifest: Manifest) -> None:
        """A storage that lost what it had taken is asked to take it again."""
        there = self.destination.sizes(CHECKPOINTS) | self.destination.sizes(OBJECTS) | self.destination.sizes(SAMPLES)
        lost = [piece.object for piece in manifest.files.values() if there.get(piece.object) != piece.size]
        for one in lost:
            self._up.pop(one, None)
        if lost:
            raise OSError(f"{lost[0]} is not there as it was sent ({len(lost)} in all)")

    def _prune(self) -> None:
        """Removes old manifests, and then what none names any more."""
        kept: list[int] = []
        for name, manifest in list(self._manifests.items()):
            if manifest.images not in kept and len(kept) < KEPT_MANIFESTS:
                kept.append(manifest.images)
                continue
            self.destination.remove(name)
            del self._manifests[name]
        named = {piece.object for manifest in self._manifests.values() for piece in manifest.files.values()}
        for one in [*self.destination.sizes(CHECKPOINTS), *self.destination.sizes(OBJECTS)]:
            if one not in named:
                self.destination.remove(one)
                self._up.pop(one, None)

    def _send_live(self, file: Path) -> None:
        """Sends a file under its own name if it has changed."""
        name = file.relative_to(self.folder).as_posix()
        facts = file.stat()
        if self._spec.get(name) == (facts.st_mtime_ns, facts.st_size):
            return
        copy = self._staging.copy(name)
        if copy:
            self._send(copy, Piece(name, checksum_of_file(copy), copy.stat().st_size))
            self._spec[name] = (facts.st_mtime_ns, facts.st_size)


def _checkpoints_in(manifest: Manifest | None) -> list[int]:
    names = manifest.files if manifest else ()
    return sorted({int(name.split("/")[1]) for name in names if name.startswith(f"{CHECKPOINTS}/")})
