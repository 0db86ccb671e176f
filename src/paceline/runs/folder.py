"""A run is a folder with one writer."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.config.files import MADE_WITH, changed_settings, to_toml
from paceline.config.resolve import Config, flatten
from paceline.core.errors import UserError
from paceline.core.lock import LOCK, InUse, Lock
from paceline.core.secrets import redact
from paceline.evaluation.protocol import differences
from paceline.runs.checkpoint import Checkpoints
from paceline.runs.segments import EARLIER, earlier_ways, way_of
from paceline.runs.status import Status

BEFORE_A_RUN = ("launch", "cell.json")  # what launchers and comparisons put into a run's folder before it begins


class RunFolder:
    """settings, metrics, samples, checkpoints and logs of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path / "checkpoints")
        self._lock: Lock | None = None
        self._total_images: int | None = None  # known once the run has begun

    @property
    def config_file(self) -> Path:
        """The resolved settings, with versions and hardware."""
        return self.path / "config.toml"

    @property
    def protocols_file(self) -> Path:
        """How the numbers of each split were measured."""
        return self.path / "protocols.json"

    def check_free(self) -> None:
        """Refuses a folder that holds other things; hidden ones, and what prepares a run, are none."""
        begun = self.config_file.exists() or (self.path / LOCK).exists()
        if begun or not self.path.is_dir():
            return
        names = sorted(os.listdir(self.path)) if os.access(self.path, os.R_OK) else []
        others = [name for name in names if name not in BEFORE_A_RUN and not name.startswith(".")]
        if others:
            raise UserError(
                f"--out {self.path}: is there and no run (it holds {others[0]}); name a folder that is new or empty"
            )

    def claim(self) -> None:
        """Makes this process the folder's one writer; the claim dies with the process."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(self.path)
            self.checkpoints.bring_back()
        except InUse as owner:
            raise UserError(f"--out {self.path}: this run is in use by process {owner}; choose another --out") from None
        except OSError as error:
            raise UserError(f"--out {self.path}: {error.strerror}") from None

    @property
    def is_mine(self) -> bool:
        """Whether this process is the folder's one writer."""
        return self._lock is not None

    def release(self) -> None:
        """Gives up the claim."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def begin(self, total_images: int) -> None:
        """Says in the folder that its run goes on now."""
        assert self._lock is not None
        self._total_images = total_images
        Status.now("running", total_images).write(self.path)

    @property
    def has_finished(self) -> bool:
        """Whether its run says that it came to its end."""
        status = Status.of(self.path)
        return status is not None and status.state == "finished"

    def end(self, state: str, why: str = "") -> None:
        """Says how a run ended that had begun; before that, and in other ranks, there is nothing to say."""
        if self._total_images is not None:
            with suppress(OSError):  # a full disk may be why it ended
                Status.now(state, self._total_images, redact(" ".join(why.split()))).write(self.path)
            self._total_images = None

    def check_settings(self, config: Config, data: str) -> None:
        """Refuses to go on with other settings or other data, once there is a checkpoint to go on from."""
        kept = self._settings() if self.checkpoints.all() else {}
        if not kept:
            return
        made_with = kept.pop(MADE_WITH, {})
        if kept.pop("recipe", None) != config.recipe_name:
            raise UserError(f"--out {self.path}: this run is of another recipe; choose another --out")
        changed = changed_settings(kept, config)
        if changed:
            raise UserError(
                f"--out {self.path}: this run was made with other settings ({'; '.join(changed)}); "
                "use the same ones to go on, or choose another --out"
            )
        if made_with.get("data", data) != data:
            raise UserError(
                f"--out {self.path}: the data is not what this run was made from ({made_with['data']} → {data}); "
                "use the same data to go on, or choose another --out"
            )

    def keep_protocol(self, split: str, label: str, protocol: Mapping[str, Any], *, afresh: bool) -> None:
        """Writes how the numbers of a split are measured that have this label in brackets; it stays so."""
        kept = {} if afresh else self._protocols()
        before = kept.setdefault(split, {}).setdefault(label, dict(protocol))
        changed = differences(before, protocol)
        if changed:
            raise UserError(
                f"--out {self.path}: its numbers on {split!r} were measured otherwise ({'; '.join(changed)}); "
                "measure the same way to go on, or choose another --out"
            )
        beside = self.protocols_file.with_suffix(".writing")
        beside.write_text(json.dumps(kept, indent=1, ensure_ascii=False))
        beside.rename(self.protocols_file)

    def protocol_of(self, metric: str) -> dict[str, Any]:
        """How a metric of this run, like `train/FID[resnet18-digits]`, was measured; nothing, where all are alike."""
        split, _, name = metric.partition("/")
        return self._protocols().get(split, {}).get(name.partition("[")[2].removesuffix("]"), {})

    def _protocols(self) -> dict[str, dict[str, Any]]:
        try:
            return json.loads(self.protocols_file.read_text())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise UserError(f"{self.protocols_file}: cannot be read ({error})") from None

    def keep_settings(self, config: Config, data: str, made_with: Mapping[str, Any], images: int) -> None:
        """Writes the resolved settings, the data's fingerprint, versions, hardware, and how the run went before.

        The run goes on from so many images.
        """
        kept = self._settings() if images else {}
        before = kept.pop(MADE_WITH, {})
        earlier = earlier_ways(kept, before, images, way_of(config.values(), made_with)) if kept else []
        self._write(config.values(), {**made_with, "data": data} | ({EARLIER: earlier} if earlier else {}))

    def keep_length(self, config: Config) -> None:
        """Writes how long the run was to be in the end, of one that saw enough before; how it was made stays."""
        kept = self._settings()
        made_with, length = kept.pop(MADE_WITH, {}), {"epochs": config.run.epochs, "images": config.run.images}
        self._write({"recipe": config.recipe_name} | flatten(kept) | length, made_with)

    def _write(self, settings: Mapping[str, Any], made_with: Mapping[str, Any]) -> None:
        beside = self.config_file.with_suffix(".writing")
        beside.write_text(to_toml(settings, made_with))
        beside.rename(self.config_file)

    def _settings(self) -> dict[str, Any]:
        """What is kept, if anything."""
        if not self.config_file.exists():
            return {}
        try:
            return tomllib.loads(self.config_file.read_text())
        except ValueError as error:
            raise UserError(f"{self.config_file}: cannot be read ({error}); choose another --out") from None
