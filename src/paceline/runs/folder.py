"""The run folder, which only one process at a time may write to."""

from __future__ import annotations

import dataclasses
import errno
import os
import shlex
import socket
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import cast

from paceline.config.files import changed_settings
from paceline.config.resolve import Config
from paceline.core.errors import UserError
from paceline.core.files import (
    LOCK,
    InUse,
    Lock,
    check_own_files,
    parse_json,
    read_bounded,
    remove_leftovers,
    sync,
    user_path,
    why,
    write_json,
)
from paceline.core.text import redact
from paceline.data.fingerprint import is_same_data
from paceline.evaluation.protocol import Protocol, differences
from paceline.runs.checkpoint import Checkpoints
from paceline.runs.record import CONFIG, Provenance, RunRecord, earlier_segments, read_record
from paceline.runs.status import Status
from paceline.runs.weights import DATA_SPEC_FILE, read_data_spec, weights_metadata

DEFAULT_PARENT = Path("runs")  # the folder of runs that have no `--out`


def suggest_other_folder(path: Path, config: Config) -> str:
    """Return the flag that starts another run: `--name NAME`, or `--out FOLDER` if the folder is not in runs/."""
    stages = [stage for names in config.recipe_class.stages.values() for stage in names]
    run = path.parent if path.name in stages else path  # a stage is a subfolder of its run
    name = next(name for number in count(2) if not (run.parent / (name := f"{run.name}-{number}")).exists())
    if run.parent == DEFAULT_PARENT:
        return f"--name {shlex.quote(name)}"
    return f"--out {shlex.quote(str(run.parent / name))}"


ALLOWED_BEFORE_START = ("launch", "cell.json")  # files that other commands write before the run starts
PROTOCOLS = "protocols.json"
LEFTOVER_SECONDS = 3600.0  # older temporary files are removed, because no process is still writing them


class RunFolder:
    """The settings, metrics, samples, checkpoints and logs of one run."""

    def __init__(self, path: Path) -> None:
        self.path = user_path(path)
        self.checkpoints = Checkpoints(path / "checkpoints", self.describe_weights)
        self._lock: Lock | None = None
        self._total_images: int | None = None  # None until the run has started

    @property
    def config_file(self) -> Path:
        """The file with the resolved settings, versions and hardware."""
        return self.path / CONFIG

    @property
    def protocols_file(self) -> Path:
        """The file that records how each split's metrics were measured."""
        return self.path / PROTOCOLS

    def check_free(self) -> None:
        """Raise UserError if the folder is not a run but contains files.

        Hidden files and the files in `ALLOWED_BEFORE_START` are ignored.
        """
        started = self.config_file.exists() or os.path.lexists(self.path / LOCK)
        if started or not self.path.is_dir():
            return
        names = sorted(os.listdir(self.path)) if os.access(self.path, os.R_OK) else []
        others = [name for name in names if name not in ALLOWED_BEFORE_START and not name.startswith(".")]
        if others:
            raise UserError(
                f"--out {self.path}: the folder exists and is not a run (it contains {others[0]}); "
                "choose a new or empty folder"
            )

    def claim(self) -> None:
        """Make this process the folder's only writer, until it calls `release` or exits."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            check_own_files(self.path)
            with suppress(OSError):  # the parent folder may be unreadable
                sync(self.path.resolve().parent)
            self._lock = Lock(self.path)
            remove_leftovers(self.path, older_than_seconds=LEFTOVER_SECONDS)  # newer files may still be in use
            self.checkpoints.restore_replaced()
        except InUse as owner:
            gone = f", or remove {self.path / LOCK} if that process no longer exists" if owner.is_elsewhere else ""
            raise UserError(
                f"--out {self.path}: this run is in use by process {owner}; choose a different --out{gone}"
            ) from None
        except OSError as error:
            if error.errno == errno.ELOOP and (self.path / LOCK).is_symlink():
                raise UserError(f"{self.path / LOCK}: is a symbolic link, which is not followed; remove it") from None
            raise UserError(f"--out {self.path}: {error.strerror}") from None

    @property
    def is_mine(self) -> bool:
        """Whether this process is the folder's only writer."""
        return self._lock is not None

    def check_present(self) -> None:
        """Raise UserError if the folder, or a folder in it, was removed or replaced after this process claimed it."""
        if self._lock is not None:
            if not self._lock.is_in_place:
                raise UserError(
                    f"--out {self.path}: the folder was removed or replaced during the run; start the run again"
                )
            check_own_files(self.path)

    def release(self) -> None:
        """Allow another process to write to the folder."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def begin(self, total_images: int) -> None:
        """Write the status "running" to status.json."""
        assert self._lock is not None
        self._total_images = total_images
        Status.now("running", total_images).write(self.path)

    @property
    def has_finished(self) -> bool:
        """Whether the run has recorded that it finished."""
        status = Status.of(self.path)
        return status is not None and status.state == "finished"

    def end(self, state: str, reason: str = "") -> None:
        """Record how the run ended; does nothing before `begin` or on ranks other than 0."""
        if self._total_images is not None and self._lock is not None and self._lock.is_in_place:
            with suppress(OSError):  # the run may have ended because the disk is full
                Status.now(state, self._total_images, redact(" ".join(reason.split()))).write(self.path)
        self._total_images = None

    def end_for_others(self, state: str, reason: str, began: float) -> None:
        """Record how a run ended if its processes could not do so, for example because they were killed.

        Does nothing unless the run's status was written on this host after `began` (Unix time), and is "running" or
        "failed".
        """
        status = Status.of(self.path)
        if status is None or status.state not in ("running", "failed"):
            return
        if status.since >= began and status.host == socket.gethostname():
            with suppress(OSError, InUse):
                lock = Lock(self.path)
                Status.now(state, status.total_images, redact(" ".join(reason.split()))).write(self.path)
                lock.release()

    def read_record(self, where: str = "") -> RunRecord | None:
        """Return the content of config.toml, or None if there is none; see `record.read_record`."""
        return read_record(self.path, where)

    def describe_weights(self) -> dict[str, str]:
        """Return the metadata that makes this run's weights self-contained; empty before the run has started."""
        record = self.read_record() if (self.path / DATA_SPEC_FILE).exists() else None
        if record is None:
            return {}
        return weights_metadata(record.recipe, record.settings, read_data_spec(self.path))

    def check_settings(self, config: Config, data: str | None = None) -> None:
        """Raise UserError if settings or data differ from those of the checkpoints in the folder.

        `data` is a fingerprint of the training samples; None if only the settings are compared.
        """
        if not self.checkpoints.all():
            return
        record = self.read_record(f"--out {self.path}")
        if record is None:
            raise UserError(
                f"--out {self.path}: has checkpoints but no {CONFIG}: restore the file, or choose a different --out"
            )
        if record.recipe != config.recipe_name:
            other = suggest_other_folder(self.path, config)
            raise UserError(
                f"--out {self.path}: this run was trained with a different recipe; to start another run, add {other}"
            )
        changed = changed_settings(record.settings, config)
        if changed:
            raise UserError(
                f"--out {self.path}: this run was trained with different settings ({'; '.join(changed)}); "
                "use the same settings to resume it, or add "
                f"{suggest_other_folder(self.path, config)} to start another run"
            )
        if data is not None and not is_same_data(record.provenance.data, data):
            raise UserError(
                f"--out {self.path}: this run was trained on different data ({record.provenance.data} → {data}); "
                "use the same data to resume it, or add "
                f"{suggest_other_folder(self.path, config)} to start another run"
            )

    def record_protocol(self, split: str, label: str, protocol: Protocol, *, overwrite: bool) -> None:
        """Record the protocol (how metrics are measured) for a split and label; raise UserError if it has changed."""
        kept = {} if overwrite else self._protocols()
        before = kept.setdefault(split, {}).setdefault(label, dict(protocol))
        changed = differences(before, protocol)
        if changed:
            raise UserError(
                f"--out {self.path}: the metrics on {split!r} were measured under a different protocol "
                f"({'; '.join(changed)}); "
                "resume with the same evaluation settings and data, or choose a different --out"
            )
        write_json(self.protocols_file, kept, durable=False, indent=1)

    def protocol_of(self, metric: str) -> Protocol:
        """Return how a metric like `train/FID[resnet18-digits]` was measured; empty if it has no label."""
        split, _, name = metric.partition("/")
        return self._protocols().get(split, {}).get(name.partition("[")[2].removesuffix("]"), {})

    def _protocols(self) -> dict[str, dict[str, Protocol]]:
        try:
            kept = parse_json(read_bounded(self.protocols_file))
            if not all(isinstance(protocol, dict) for labels in kept.values() for protocol in labels.values()):
                raise ValueError("an evaluation protocol is not a JSON object")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(f"{self.protocols_file}: cannot be read ({why(error)}): restore the file") from None
        return cast(dict[str, dict[str, Protocol]], kept)

    def record_settings(self, config: Config, provenance: Provenance, images: int) -> None:
        """Write config.toml for a run that starts or resumes at `images`, and keep the record of earlier segments."""
        record = _record_of(config, provenance)
        before = self.read_record() if images else None
        if before:
            earlier = earlier_segments(before.segments, images, record.segment)
            record = _record_of(config, dataclasses.replace(provenance, earlier=earlier))
        record.write(self.path)

    def record_length(self, config: Config) -> None:
        """Update only the training length in config.toml, for a run that needs no further training."""
        record = self.read_record()
        assert record is not None
        length = {"epochs": config.run.epochs, "images": config.run.images}
        dataclasses.replace(record, settings={**record.settings, **length}).write(self.path)


def _record_of(config: Config, provenance: Provenance) -> RunRecord:
    settings = config.values()
    del settings["recipe"]
    return RunRecord(config.recipe_name, settings, provenance)
