"""Checkpoints: written atomically, without pickle, with the SHA-256 of each file in a manifest.

    checkpoints/000000045000/  weights.safetensors  state.safetensors  state.json  manifest.json

A checkpoint that does not match its manifest is reported by name, and the previous one is used.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from paceline.config.run_format import RUN_FORMAT
from paceline.core.checksums import checksum_of_content
from paceline.core.errors import UserError, unknown
from paceline.core.files import sync
from paceline.core.printable import print_line
from paceline.core.small_files import parse_json, read_bounded
from paceline.runs.checkpoint_reader import MANIFEST, NUMBERS, Damaged, is_whole, load, load_without_state
from paceline.runs.snapshot import INVALID, CheckpointNumbers, Snapshot
from paceline.runs.written_files import WriteTensors, Written, write_alone

NAME = re.compile(r"[0-9]{12,18}")  # name of a checkpoint: the number of images seen
WRITING = ".writing-"  # prefix of a checkpoint that is still being written
REMOVING = ".removing-"
REPLACED = ".replaced-"  # prefix of a checkpoint that is being replaced


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, describe: Callable[[], Mapping[str, str]] = dict) -> None:
        """Open the checkpoints in a folder; `describe` returns the metadata to store in weights.safetensors."""
        self.folder, self.describe = folder, describe

    def all(self) -> list[int]:
        """Return the number of images seen at each checkpoint, in ascending order; some checkpoints may be damaged."""
        if not self.folder.is_dir():
            return []
        return sorted(int(entry.name) for entry in self.folder.iterdir() if NAME.fullmatch(entry.name))

    def path(self, images: int) -> Path:
        """Return a checkpoint's folder."""
        return self.folder / f"{images:012d}"

    def save(self, snapshot: Snapshot, write: WriteTensors = write_alone) -> Path:
        """Write a checkpoint atomically, unless an intact one with the same state.json exists."""
        final, temporary = self.path(snapshot.images), self.folder / f"{WRITING}{snapshot.images:012d}"
        numbers = _encode({"images": snapshot.images, **snapshot.numbers.to_json()})
        whole = final.exists() and is_whole(final)
        if whole and read_bounded(final / NUMBERS) == numbers:
            return final
        try:
            self.folder.mkdir(exist_ok=True)  # no `parents=True`: a deleted run folder must not be recreated
            self._remove_leftovers()
            temporary.mkdir()
            written = write(temporary, snapshot, self.describe())
            for name, content in ((NUMBERS, numbers), (MANIFEST, _manifest(written, numbers))):
                (temporary / name).write_bytes(content)
                sync(temporary / name)
            sync(temporary)
            replaced = final.rename(final.with_name(REPLACED + final.name)) if whole else None
            if final.exists():
                self._set_aside(final)
            temporary.rename(final)
            sync(self.folder)
            sync(self.folder.parent)  # flushes the directory entries for this folder and metrics.jsonl
            if replaced:
                shutil.rmtree(replaced)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            reason = error.strerror or error
            raise UserError(f"cannot write checkpoint {final}: {reason}; {self.describe_newest()}") from error
        return final

    def restore_replaced(self) -> None:
        """Restore the old checkpoint if a process was killed while replacing it.

        Only the process that writes to the folder may call this method.
        """
        for old in self.folder.glob(f"{REPLACED}*"):
            final = old.with_name(old.name.removeprefix(REPLACED))
            if not final.exists():
                old.rename(final)

    def describe_newest(self) -> str:
        """Describe where the run can resume from, for the message that reports why it ended."""
        kept = self.all()
        return f"the last checkpoint is at {kept[-1]:,} images" if kept else "no checkpoint has been written yet"

    def latest(
        self,
        report: Callable[[str], None],
        check: Callable[[Snapshot], None] = lambda snapshot: None,
        read: Callable[[Path], Snapshot] = load,
        remedy: str = "",
    ) -> Snapshot | None:
        """Return the newest usable checkpoint, or None if the run has no checkpoints.

        A checkpoint is usable if it is intact and `check` raises no UserError. `report` is called with a message for
        each newer checkpoint that is not usable. Raise UserError if no checkpoint is usable.
        `read` is one of the functions of `checkpoint_reader`. `remedy` is the end of the error message for damaged
        checkpoints; by default, it explains how to train the run again.
        """
        remedy = remedy or f"to start over, rename {self.folder} or choose a different --out"
        kept, unfit = self.all(), list[tuple[int, UserError]]()
        for images in reversed(kept):
            try:
                snapshot = read(self.path(images))
                check(snapshot)
            except Damaged as damage:
                if images == kept[0] and not unfit:
                    raise UserError(f"{damage.problem}, and there is no earlier checkpoint; {remedy}") from None
                report(f"{damage.problem}; using the previous one")
            except UserError as error:
                unfit.append((images, error))  # reported only if an older checkpoint fits; otherwise, raised below
            else:
                for later, reason in unfit:
                    report(f"checkpoint {self.path(later)} does not match this run ({reason}); using the previous one")
                return snapshot
        if unfit:
            raise unfit[0][1]
        return None

    def prune(self, keep: int, best: int | None) -> None:
        """Remove all but the last `keep` checkpoints and the best one.

        For each of the last checkpoints, also keep the checkpoint that was the best one at that time. A run that
        resumes from an older checkpoint needs it.
        """
        last = self.all()[-keep:]
        kept = {*last, best, *map(self._best_of, last)}
        for images in self.all():
            if images not in kept:
                self._remove(self.path(images))

    def _best_of(self, images: int) -> int | None:
        """Return the checkpoint that was the best one when this checkpoint was written, or None if unknown."""
        try:
            best = CheckpointNumbers.from_json(parse_json(read_bounded(self.path(images) / NUMBERS)), images).best
        except (OSError, *INVALID):
            return None
        return best.images if best else None

    def set_aside_after(self, images: int) -> None:
        """Rename all checkpoints newer than the one that the run resumes from, because they cannot be used."""
        for later in self.all():
            if later > images:
                self.set_aside(later)

    def set_aside(self, images: int) -> None:
        """Rename a checkpoint that cannot be used; do nothing if it is missing."""
        if self.path(images).exists():
            self._set_aside(self.path(images))

    def _set_aside(self, path: Path) -> None:
        """Rename a damaged checkpoint, so that users can still recover parts of it."""
        aside = path.with_name(f"damaged-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)

    def _remove(self, path: Path) -> None:
        """Rename a checkpoint and then remove it, so that a killed process leaves no partial checkpoint behind."""
        shutil.rmtree(path.rename(path.with_name(f"{REMOVING}{path.name}")))

    def _remove_leftovers(self) -> None:
        for prefix in (WRITING, REMOVING, REPLACED):
            for leftover in self.folder.glob(f"{prefix}*"):
                shutil.rmtree(leftover)


def choose_checkpoint(checkpoints: Checkpoints, which: str) -> Snapshot:
    """Return the checkpoint selected by `best`, `last` or a number of images, without its training state.

    If the best checkpoint is damaged or missing, print a line and return the last one.
    """
    kept = checkpoints.all()
    if kept and which not in ("best", "last"):
        if not (which.isascii() and which.isdecimal()):
            raise unknown("checkpoint", which, ["best", "last", *map(str, kept)])
        if int(which) not in kept:
            raise UserError(
                f"--checkpoint {which}: no checkpoint was kept at this number of images; "
                f"choose one of: best, last, {', '.join(map(str, kept))}"
            )
        return load_without_state(checkpoints.path(int(which)))
    last = checkpoints.latest(print, read=load_without_state, remedy="restore it from a copy, or train the run again")
    if last is None:
        raise UserError(f"{checkpoints.folder}: has no checkpoint yet; train the run until it has saved one")
    if which == "last" or last.best_images == last.images:
        return last
    try:
        return load_without_state(checkpoints.path(last.best_images))
    except Damaged as damage:
        print_line(f"the best {damage.problem}; using the last one, at {last.images:,} images")
        return last


def _manifest(written: Mapping[str, Written], numbers: bytes) -> bytes:
    """Return the content of manifest.json."""
    manifest = {
        "format": RUN_FORMAT,
        "sha256": {name: one.sha256 for name, one in written.items()} | {NUMBERS: sha256(numbers).hexdigest()},
        "tensors": {name: asdict(one.notes) for name, one in written.items()},
    }
    return _encode(manifest | {"seal": checksum_of_content(manifest)})


def _encode(content: object) -> bytes:
    return json.dumps(content, indent=1).encode()
