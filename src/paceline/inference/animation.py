"""Frames of an animation: the sample images of one or more runs over the course of training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from paceline.core.errors import UserError
from paceline.images.decode import BadImage, decode
from paceline.images.grids import captioned, side_by_side
from paceline.runs.finished_run import readable_config_of
from paceline.runs.metrics import SAMPLES


def animation_frames(runs: Sequence[str]) -> list[Image.Image]:
    """Return a frame for each point in training at which samples were saved; it shows each run's latest samples."""
    samples = {run: _sample_files(run) for run in runs}
    frames = []
    for seen in sorted({images for files in samples.values() for images in files}):
        shown = []
        for run, files in samples.items():
            latest = max((images for images in files if images <= seen), default=min(files))
            shown.append(captioned(_read(files[latest]), f"{Path(run).name}: {latest:,} images"))
        frames.append(side_by_side(shown))
    return frames


def _read(file: Path) -> Image.Image:
    try:
        return decode(file).convert("RGB")
    except BadImage as error:
        raise UserError(f"{file}: unreadable image ({error}); delete it to leave it out of the animation") from error


def _sample_files(run: str) -> dict[int, Path]:
    """Return a run's sample image files, keyed by the number of images seen."""
    readable_config_of(run)  # raises UserError if `run` is not a run folder
    found = {}
    for path in (Path(run) / SAMPLES).glob("samples-*.png"):
        images = path.stem.rpartition("-")[2]
        if images.isdecimal():
            found[int(images)] = path
    if not found:
        raise UserError(f"{run}: has no images in {SAMPLES}/ to animate; choose a run with sample images")
    return found
