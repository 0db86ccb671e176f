"""Weights & Biases: sends metrics, settings and samples to its server, or writes them to the run folder (offline)."""

from __future__ import annotations

import gc
import math
import netrc
import os
import secrets
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from PIL import Image

from paceline.core.text import one_line, print_line, redact
from paceline.runs.logger import Logger, Pixels, describe_run, read_run_id, write_run_id
from paceline.runs.metrics import SAMPLE_NAME, SAMPLES, read_metrics

NAME = "wandb"
PROJECT = "paceline"  # used if WANDB_PROJECT is not set
INIT_SECONDS = 30.0  # maximum time to wait for the server at the start of a run
FINISH_SECONDS = 25.0  # maximum time to upload the last entries, unless WANDB_FINISH_TIMEOUT is set
CLOCKS = ("seconds", "time")  # values in metrics.jsonl that loggers do not receive
WEIGHTS = "weights"  # key of the weights file in the run's summary
SETTINGS = {
    "console": "off",  # the run folder contains the output
    "silent": True,
    "symlink": False,
    "save_code": False,
    "x_disable_machine_info": True,  # the run's config contains the hardware, without credentials in addresses
    "x_disable_stats": True,
    "x_save_requirements": False,
}


class WandB(Logger):
    """Logs a run to Weights & Biases. A resumed run keeps its ID.

    W&B cannot append to a run that was logged offline. A run that resumes offline therefore writes its earlier metrics
    and samples again, so that its newest offline folder is complete.
    """

    package = "wandb"
    extra = "wandb"

    def __init__(self, folder: Path, images: int) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")  # otherwise, W&B prints messages before it reads its settings
        # W&B links to a log file in its cache. A link that points outside the run folder prevents a killed run from
        # resuming.
        os.environ["WANDB_CACHE_DIR"] = str((folder / "wandb" / "cache").absolute())
        self._folder, self._images = folder, images
        self._id = (read_run_id(folder, NAME) if images else "") or secrets.token_hex(4)
        self._run: Any = None  # set by `connect`
        write_run_id(folder, NAME, self._id)

    def connect(self) -> None:
        mode = os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")
        if mode == "offline" and "WANDB_MODE" not in os.environ:
            self._note("no API key was found")
        try:
            self._run = self._start(mode)
        except Exception as error:
            if mode == "offline":
                raise
            self._note(one_line(error))
            mode = "offline"
            self._run = self._start(mode)
        self._remove_links()
        if mode == "online":
            print_line(f"W&B run: {redact(self._run.url)}")
        if mode == "offline" and self._images:
            self._replay()

    def _note(self, reason: str) -> None:
        print_line(
            f"logger {NAME} works offline ({reason}); upload the run later with: "
            f"wandb sync {self._folder / 'wandb'}/offline-run-*-{self._id}"
        )

    def _start(self, mode: Any) -> Any:
        import wandb

        settings = SETTINGS | {
            "init_timeout": INIT_SECONDS,
            "finish_timeout": float(os.environ.get("WANDB_FINISH_TIMEOUT", FINISH_SECONDS)),
        }
        known = {name: value for name, value in settings.items() if name in wandb.Settings.model_fields}
        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", self._folder.absolute().name),
            id=self._id,
            dir=str(self._folder.absolute()),
            config=describe_run(self._folder),
            allow_val_change=True,
            resume="allow" if mode != "offline" else None,
            mode=mode,
            reinit="create_new",
            settings=wandb.Settings(**known),
        )

    def _remove_links(self) -> None:
        """Remove W&B's links, which are absolute and would point outside the run folder if the folder were moved."""
        for path in (self._folder / "wandb").rglob("*"):
            if path.is_symlink():
                path.unlink(missing_ok=True)

    def _replay(self) -> None:
        """Log the metrics and samples up to the checkpoint again."""
        import wandb

        steps: dict[int, dict[str, Any]] = defaultdict(dict)
        for line in read_metrics(self._folder):
            values = {name: math.nan if value is None else value for name, value in line.items()}
            steps[int(values.pop("images"))] |= {name: value for name, value in values.items() if name not in CLOCKS}
        for file in (self._folder / SAMPLES).glob("*"):
            if sample := SAMPLE_NAME.fullmatch(file.name):
                steps[int(sample[2])][f"{SAMPLES}/{sample[1]}"] = wandb.Image(str(file))
        for images in sorted(images for images in steps if images <= self._images):
            self._run.log(steps[images], step=images)

    def write(self, images: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=images)

    def image(self, name: str, images: int, pixels: Pixels) -> None:
        import wandb

        shown = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
        self._run.log({f"{SAMPLES}/{name}": wandb.Image(Image.fromarray(shown))}, step=images)

    def end(self, state: str, weights: Path | None) -> None:
        self._run.summary["state"] = state
        if weights:
            self._run.summary[WEIGHTS] = str(weights)
        self._run.finish(exit_code=0 if state == "finished" else 1)
        for kept in gc.get_objects():  # W&B removes its temporary folders when Python shuts down, which a run skips
            if type(kept) is TemporaryDirectory and Path(kept.name).name.endswith(("wandb-media", "wandb-artifacts")):
                kept.cleanup()


def _has_key() -> bool:
    """Return whether the user is logged in to the W&B server."""
    import wandb

    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    settings = wandb.setup().settings
    host = urlsplit(settings.base_url).hostname or ""
    try:
        return bool(settings.api_key or netrc.netrc(os.environ.get("NETRC")).authenticators(host))
    except (OSError, netrc.NetrcParseError):
        return False
