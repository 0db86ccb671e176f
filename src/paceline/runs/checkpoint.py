"""Checkpoints: written atomically in a thread, by one or several processes, without pickle, with their SHA-256."""

from __future__ import annotations

import errno
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from hashlib import file_digest, sha256
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from safetensors import SafetensorError
from torch import Tensor

from paceline.config.files import RUN_FORMAT
from paceline.core.background import Background
from paceline.core.errors import UserError, unknown
from paceline.core.files import (
    SAFETENSORS,
    checksum_of_content,
    checksum_of_file,
    open_bounded,
    parse_json,
    read_bounded,
    sync,
    why,
)
from paceline.core.text import print_line
from paceline.core.types import JsonObject
from paceline.core.watch import beat
from paceline.runs.tensor_files import (
    TensorNotes,
    apply_notes,
    map_tensors,
    reserve,
    unpack,
    write_rows,
    write_tensors,
)

INVALID = (ValueError, KeyError, TypeError, AttributeError, OverflowError)
ScalerState = Mapping[str, float]  # state of a GradScaler; empty if it is disabled


@dataclass(frozen=True)
class Best:
    """The best value so far of the metric that selects checkpoints."""

    name: str  # name of the metric, with its label in [brackets]
    value: float
    images: int  # images seen at the checkpoint with this value


@dataclass(frozen=True)
class CheckpointNumbers:
    """The state of a run that is not stored as tensors."""

    best: Best | None = None
    evaluated_at: int = -1  # images seen at the last evaluation; -1 if there was none
    scalers: Mapping[str, ScalerState] = field(default_factory=dict)  # keyed by network name

    def to_json(self) -> JsonObject:
        """Return the values as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Any, images: int) -> CheckpointNumbers:
        """Parse the values for the checkpoint at `images`; raise one of the errors in `INVALID` if any is invalid."""
        _count(content["images"], "images", images, images)
        evaluated_at = _count(content["evaluated_at"], "evaluated_at", -1, images)
        best, scalers = content["best"], content["scalers"]
        if best is not None:
            if not isinstance(best["name"], str):
                raise TypeError("best.name is not a string")
            seen = _count(best["images"], "best.images", 0, images)
            best = Best(best["name"], _number(best["value"], "best.value"), seen)
        for name, values in scalers.items():
            if not all(math.isfinite(_number(value, "a scaler's value")) for value in values.values()):
                raise ValueError(f"the scaler of {name!r} has a value that is not finite")
        return cls(best, evaluated_at, scalers)


@dataclass(frozen=True)
class Rows:
    """Which rows of a tensor a process has, if the tensor is divided among the processes."""

    first: int  # index of the first row
    shape: tuple[int, ...]  # shape of the whole tensor


@dataclass(frozen=True)
class Snapshot:
    """Everything that a checkpoint stores so that a run can resume."""

    images: int
    weights: dict[str, Tensor]  # weights of all networks; EMAs are named ema/NETWORK.PARAMETER
    state: dict[str, Tensor]  # optimizer state, and signals (scalars passed between phases)
    numbers: CheckpointNumbers
    rows: Mapping[str, Rows] = field(default_factory=dict)  # by tensor name; tensors that are not listed are whole

    @property
    def best_images(self) -> int:
        """The number of images seen at the best checkpoint, or at this one if none has been evaluated."""
        return self.numbers.best.images if self.numbers.best else self.images


def _count(value: object, name: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:  # `isinstance` would accept a bool
        raise ValueError(f"{name} is {value!r:.40}: expected a whole number from {low} to {high}")
    return value


def _number(value: object, name: str) -> float:
    """Return a number as a float; it may be infinite, like the PSNR of identical images."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise ValueError(f"{name} is {value!r:.40}: expected a number")
    return float(value)  # raises OverflowError for a huge int


WEIGHTS = f"weights{SAFETENSORS}"
STATE = f"state{SAFETENSORS}"
TENSORS = (WEIGHTS, STATE)


class Written(NamedTuple):
    """A tensor file that is complete and synced."""

    sha256: str
    notes: TensorNotes


# Writes the tensor files to a folder, given a snapshot and the metadata of the weights file.
WriteTensors = Callable[[Path, Snapshot, Mapping[str, str]], dict[str, Written]]


def write_alone(folder: Path, snapshot: Snapshot, metadata: Mapping[str, str]) -> dict[str, Written]:
    """Write all tensors from this process, which has them in full."""
    parts = {WEIGHTS: (snapshot.weights, metadata), STATE: (snapshot.state, {})}
    notes = {name: write_tensors(folder / name, *part) for name, part in parts.items()}
    return {name: Written(checksum_of_file(folder / name), note) for name, note in notes.items()}


MANIFEST = "manifest.json"
NUMBERS = "state.json"
MAX_TENSOR_BYTES = 2**40
MISMATCH = "does not match its recorded SHA-256"
UNREADABLE = (*INVALID, RuntimeError, SafetensorError)


class Damaged(UserError):
    """Raised for a checkpoint that is missing, or whose files do not match its manifest."""

    def __init__(self, path: Path, reason: str) -> None:
        self.problem = f"checkpoint {path} is {f'damaged ({reason})' if path.exists() else 'missing'}"
        super().__init__(self.problem)


class _Manifest(NamedTuple):
    """The content of manifest.json."""

    sha256: Mapping[str, str]  # by file name
    notes: Mapping[str, TensorNotes]  # properties of the tensors, by file name


def is_whole(path: Path) -> bool:
    """Return whether a checkpoint's files match its manifest. Large files are not read into memory."""
    try:
        manifest = _read_manifest(path)
        for name in manifest.sha256:
            _check_file(path, name, manifest)
    except Damaged:
        return False
    return True


def check_weights(path: Path) -> None:
    """Raise Damaged if a checkpoint cannot be used for inference. The file with the training state is not read."""
    manifest = _read_manifest(path)
    _check_file(path, WEIGHTS, manifest)
    _read_numbers(path, manifest)


def load(path: Path, names: Sequence[str] = TENSORS) -> Snapshot:
    """Return the checkpoint in a folder; raise Damaged if its files do not match its manifest.

    Only the tensor files in `names` are read, and the others may be missing.
    """
    manifest = _read_manifest(path)
    contents = {name: _read_file(path, name, manifest) for name in names}
    return _snapshot(path, manifest, names, lambda name: unpack(contents.pop(name), manifest.notes[name]))


def load_without_state(path: Path) -> Snapshot:
    """Return a checkpoint for inference. The file with the training state is not read, and may be missing."""
    return load(path, (WEIGHTS,))


def load_mapped(path: Path, *, check: bool = True, names: Sequence[str] = TENSORS) -> Snapshot:
    """Return a checkpoint whose tensors are read when they are used, for a process that needs only some rows of them.

    Only the tensor files in `names` are opened. With `check=False`, their SHA-256 is not computed, because another
    process has done so. Do not keep such a snapshot: its files stay open, and so they stay on the disk if the
    checkpoint is removed.
    """
    manifest = _read_manifest(path)
    for name in names if check else ():
        _check_file(path, name, manifest)
    return _snapshot(path, manifest, names, lambda name: apply_notes(map_tensors(path / name), manifest.notes[name]))


def _snapshot(
    path: Path, manifest: _Manifest, names: Sequence[str], read: Callable[[str], dict[str, Tensor]]
) -> Snapshot:
    numbers, tensors = _read_numbers(path, manifest), dict[str, dict[str, Tensor]]()
    for name in names:
        with _reporting_damage(path, name):
            tensors[name] = read(name)
    return Snapshot(int(path.name), tensors[WEIGHTS], tensors.get(STATE, {}), numbers)


def _read_manifest(path: Path) -> _Manifest:
    with _reporting_damage(path, MANIFEST):
        manifest = parse_json(read_bounded(path / MANIFEST))
        if manifest["format"] != RUN_FORMAT:
            reads = f"but this version of Paceline reads format {RUN_FORMAT}"
            raise Damaged(path, f"{MANIFEST} has format {manifest['format']}, {reads}")
        if manifest.pop("seal") != checksum_of_content(manifest):
            raise Damaged(path, f"{MANIFEST} {MISMATCH}")
        digests = {name: manifest["sha256"][name] for name in (*TENSORS, NUMBERS)}
        return _Manifest(digests, {name: TensorNotes.from_json(manifest["tensors"][name]) for name in TENSORS})


def _read_file(path: Path, name: str, manifest: _Manifest) -> bytes:
    """Return the content of a file; raise Damaged if it does not match the manifest."""
    with _reporting_damage(path, name):
        content = read_bounded(path / name, MAX_TENSOR_BYTES)
        if sha256(content).hexdigest() != manifest.sha256[name]:
            raise Damaged(path, f"{name} {MISMATCH}")
    return content


def _check_file(path: Path, name: str, manifest: _Manifest) -> None:
    """Raise Damaged if a file does not match the manifest."""
    with _reporting_damage(path, name), open_bounded(path / name, MAX_TENSOR_BYTES) as file:
        if file_digest(file, "sha256").hexdigest() != manifest.sha256[name]:
            raise Damaged(path, f"{name} {MISMATCH}")


def _read_numbers(path: Path, manifest: _Manifest) -> CheckpointNumbers:
    content = _read_file(path, NUMBERS, manifest)
    with _reporting_damage(path, NUMBERS):
        return CheckpointNumbers.from_json(parse_json(content), int(path.name))


@contextmanager
def _reporting_damage(path: Path, name: str) -> Iterator[None]:
    """Turn errors that a missing or damaged file causes into Damaged."""
    try:
        yield
    except Damaged:
        raise
    except FileNotFoundError:
        raise Damaged(path, f"{name} is missing") from None
    except OSError as error:
        raise Damaged(path, f"{name} cannot be read: {error.strerror}") from None
    except UNREADABLE as error:
        raise Damaged(path, f"{name} cannot be read: {why(error)}") from None


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
            for prefix in (WRITING, REMOVING, REPLACED):
                for leftover in self.folder.glob(f"{prefix}*"):
                    shutil.rmtree(leftover)
            temporary.mkdir()
            written = write(temporary, snapshot, self.describe())
            manifest = {
                "format": RUN_FORMAT,
                "sha256": {name: one.sha256 for name, one in written.items()} | {NUMBERS: sha256(numbers).hexdigest()},
                "tensors": {name: asdict(one.notes) for name, one in written.items()},
            }
            sealed = _encode(manifest | {"seal": checksum_of_content(manifest)})
            for name, content in ((NUMBERS, numbers), (MANIFEST, sealed)):
                (temporary / name).write_bytes(content)
                sync(temporary / name)
            sync(temporary)
            replaced = final.rename(final.with_name(REPLACED + final.name)) if whole else None
            self.set_aside(snapshot.images)
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
                path = self.path(images)  # renamed first, so that a killed process leaves no partial checkpoint
                shutil.rmtree(path.rename(path.with_name(f"{REMOVING}{path.name}")))

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
        """Rename a checkpoint that cannot be used, so that users can recover parts; do nothing if it is missing."""
        path = self.path(images)
        if path.exists():
            aside = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


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


def _encode(content: object) -> bytes:
    return json.dumps(content, indent=1).encode()


class Writers(Protocol):
    """The processes that write a checkpoint together."""

    @property
    def rank(self) -> int:
        """The position of this process; process 0 creates the files."""

    def exchange(self, text: str) -> list[str]:
        """Return the texts of all processes, in rank order."""


@contextmanager
def joint_writer(writers: Writers) -> Iterator[WriteTensors]:
    """Yield a function with which process 0 writes a checkpoint's tensors, while the others call `help_write`.

    If the function is not called, the other processes write nothing.
    """
    announced = False

    def write(folder: Path, snapshot: Snapshot, metadata: Mapping[str, str]) -> dict[str, Written]:
        nonlocal announced
        notes = {
            name: reserve(
                folder / name,
                tensors,
                metadata if name == WEIGHTS else {},
                {key: rows.shape for key, rows in snapshot.rows.items() if key in tensors},
            )
            for name, tensors in zip(TENSORS, (snapshot.weights, snapshot.state), strict=True)
        }
        announced = True
        writers.exchange(str(folder))
        problems = writers.exchange(_write_own(folder, snapshot, only_rows=False))
        for rank, problem in enumerate(problems):
            if problem:
                raise OSError(errno.EIO, problem if rank == writers.rank else f"{problem} (rank {rank})")
        return {name: Written(checksum_of_file(folder / name), note) for name, note in notes.items()}

    try:
        yield write
    finally:
        if not announced:
            writers.exchange("")


def help_write(snapshot: Snapshot, writers: Writers) -> None:
    """Write this process's rows of the sharded tensors to the files that process 0 creates."""
    folder = writers.exchange("")[0]
    if folder:
        writers.exchange(_write_own(Path(folder), snapshot, only_rows=True))


def _write_own(folder: Path, snapshot: Snapshot, *, only_rows: bool) -> str:
    """Write this process's tensors to the checkpoint's files; return why this failed, or "" if it did not."""
    first = {name: rows.first for name, rows in snapshot.rows.items()}
    try:
        for name, tensors in zip(TENSORS, (snapshot.weights, snapshot.state), strict=True):
            own = {key: tensor for key, tensor in tensors.items() if key in first or not only_rows}
            write_rows(folder / name, own, first)
    except OSError as error:
        return error.strerror or str(error)
    except Exception as error:  # the other processes wait for this one, so every error must be reported to them
        return f"{type(error).__name__}: {error}"
    return ""


LAST_SECONDS = 2.0  # maximum time to wait for a save after a second Ctrl-C


class Saver(Background):
    """Writes one checkpoint at a time in a thread; an error in the thread is raised at the next call.

    The `with` block waits for a pending save before it exits, even after an error.
    """

    def __init__(self, checkpoints: Checkpoints, writers: Writers | None = None) -> None:
        """Create a saver. `writers` are the processes that write each checkpoint together, if there are several."""
        super().__init__("saver")
        self.checkpoints, self.writers = checkpoints, writers
        self.num_saves = 0
        self.saved_at = -1  # images seen at the last checkpoint that this process has completed
        self.seconds = 0.0  # total time spent in the thread

    def save(
        self,
        snapshot: Callable[[], Snapshot],
        keep: int,
        best: int | None,
        *,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Start writing a snapshot, which must no longer change; all functions are called in the thread."""
        self.wait()

        def write() -> None:
            began = perf_counter()
            try:
                taken = snapshot()
                if self._write(taken, before):
                    self.saved_at = taken.images
                    beat()
                    self.checkpoints.prune(keep, best)
                    self.num_saves += 1
                    after()
            finally:
                self.seconds += perf_counter() - began

        self.add(write)

    def _write(self, snapshot: Snapshot, before: Callable[[], None]) -> bool:
        """Write a checkpoint, or this process's part of it; return whether this process completes checkpoints."""
        if self.writers and self.writers.rank > 0:
            help_write(snapshot, self.writers)
            return False
        with joint_writer(self.writers) if self.writers else nullcontext(write_alone) as write:
            before()
            self.checkpoints.save(snapshot, write)
        return True

    def describe_cost(self, in_loop: float) -> str:
        """Return a line about the seconds spent on checkpoints, in the training loop and in the thread."""
        checkpoints = "1 checkpoint" if self.num_saves == 1 else f"{self.num_saves} checkpoints"
        return f"saved {checkpoints}: {in_loop:.2f} s in the loop, {self.seconds:.2f} s in the background"

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:  # an error from the save must not hide the first error
                self.wait()
        finally:
            self.close(LAST_SECONDS if kind and issubclass(kind, KeyboardInterrupt) else math.inf)
