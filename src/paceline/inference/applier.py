"""One picture through networks on one device: read, cut in tiles, put together, written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from paceline.core.errors import UserError
from paceline.data.memory import free_bytes
from paceline.images.decode import BadImage
from paceline.images.image_file import Canvas, ImageData, read_image, save_image
from paceline.inference.downsampled import compare, shrink
from paceline.inference.image_model import ImageModel, open_image_model
from paceline.inference.tiling import Tiling, choose_tiling, restore_in_tiles
from paceline.parallel.precision import choose_precision

BYTES_PER_PX = {False: 4, True: 6}  # of a result in memory, by whether it has 16 bits
ALPHA_BYTES_PER_PX = {False: 2, True: 0}  # besides, while one is written
NO_MEMORY = "can't allocate memory"  # in what torch raises on the host, where it has no class of its own
Advance = Callable[[int], None]


@dataclass(frozen=True)
class How:
    """What to apply, and how."""

    path: str  # a run's folder or a weights file
    checkpoint: str = "best"
    tile: int = 0
    downsample: str = ""


@dataclass(frozen=True, eq=False)
class Task:
    """One picture, and the file for each result by name."""

    path: str
    targets: dict[str, str]


@dataclass(frozen=True)
class Outcome:
    """What became of a picture."""

    path: str
    line: str = ""  # for the person who watches
    problem: str = ""  # why it could not be used
    numbers: dict[str, float] = field(default_factory=dict)


class Applier:
    """Networks on a device, and the pictures that they are applied to one by one."""

    def __init__(self, how: How, image_model: ImageModel | None, device: torch.device, share: int = 1) -> None:
        self.how, self.device, self.share = how, device, share
        self.image_model = image_model or open_image_model(how.path, how.checkpoint)
        self.field = self.image_model.field  # before the weights are moved: it is of tensors on the CPU
        choose_precision("fp32", device).apply(deterministic=True)  # tiles and whole pictures shall agree
        self.image_model.recipe.to(device)

    def do(self, task: Task, advance: Advance) -> Outcome:
        """Applies the networks to one picture; a file that cannot be used is an outcome, too."""
        try:
            picture = read_image(Path(task.path))
            self._check_room(picture)
            work = self._compare if self.how.downsample else self._restore
            return work(task, picture, advance)
        except BadImage as problem:
            return Outcome(task.path, problem=str(problem))
        except OSError as error:
            raise UserError(f"--out: cannot write what became of {task.path}: {error.strerror or error}") from error

    def make(self, pixels: np.ndarray) -> dict[str, Image.Image]:
        """What the networks make of one picture of 8 bits [h, w, c], by name."""
        canvases, _, _ = self._make(pixels, False, lambda _: None)
        return {name: canvas.image for name, canvas in canvases.items()}

    def _restore(self, task: Task, picture: ImageData, advance: Advance) -> Outcome:
        canvases, tiling, count = self._make(picture.pixels, picture.deep, advance)
        for name, canvas in canvases.items():
            target = Path(task.targets[name if name in task.targets else ""])
            target.parent.mkdir(parents=True, exist_ok=True)
            canvas.save(target, picture.alpha, picture.profile, picture.exif)
        height, width = picture.pixels.shape[:2]
        scale = self.image_model.output_scale
        made = f" → {width * scale}×{height * scale}" if scale > 1 else ""
        tiles = f", {count} tiles of {tiling.side_px} pixels and {tiling.halo_px} around" if count > 1 else ""
        notes = "".join(f"; {note}" for note in (tiling.note, picture.note) if note)
        return Outcome(task.path, f"{task.path}: {width}×{height}{made}{tiles} → {_named(task)}{notes}")

    def _compare(self, task: Task, picture: ImageData, advance: Advance) -> Outcome:
        """Shrinks the picture first, and holds what comes out against it."""
        original, small = shrink(picture, self.image_model.output_scale)
        pixels = np.asarray(small) if small.mode == "RGB" else np.asarray(small)[..., np.newaxis]
        canvases, tiling, _ = self._make(
            pixels, False, lambda pixels: advance(pixels * self.image_model.output_scale**2)
        )
        made = canvases["image"].image
        images, numbers = compare(
            original, small, made, self.image_model.output_scale, self.image_model.config.run.protocol
        )
        for name, image in images.items():
            target = Path(task.targets[name])
            target.parent.mkdir(parents=True, exist_ok=True)
            save_image(image, target)
        told = ", ".join(f"{name} {value:.4f}" for name, value in numbers.items())
        note = f"; {tiling.note}" if tiling.note else ""
        return Outcome(task.path, f"{task.path}: {told} → {task.targets['']}{note}", numbers=numbers)

    def _make(self, pixels: np.ndarray, deep: bool, advance: Advance) -> tuple[dict[str, Canvas], Tiling, int]:
        """The results, how the picture was cut, and into how many tiles; smaller ones where memory is short."""
        height, width = pixels.shape[:2]
        scale = self.image_model.output_scale
        at_once = 3 if pixels.shape[-1] > self.image_model.spec.channels else 1  # colours that a grey network sees
        tiling = choose_tiling(
            self.field,
            (height, width),
            self.device,
            share=self.share * at_once,
            side=self.how.tile,
            held=self._bytes_of_results(height, width, deep),
        )
        while True:
            canvases: dict[str, Canvas] = {}
            counted = [0]

            def paste(name: str, top: int, left: int, values: np.ndarray) -> None:
                canvas = canvases.setdefault(name, Canvas(height * scale, width * scale, deep=deep))  # noqa: B023
                canvas.paste(top, left, values)

            def count(done: int) -> None:
                counted[0] += 1  # noqa: B023
                advance(done)

            try:
                restore_in_tiles(self.image_model, pixels, tiling, paste, count)
                return canvases, tiling, counted[0]
            except (RuntimeError, MemoryError) as error:
                if not _is_short_of_memory(error):
                    raise
                note = f"{self.field.obstacles[0]}: tiles may show" if self.field.obstacles else tiling.note
                smaller = Tiling(min(tiling.side_px, max(height, width)), self.field.tiled_halo_px, note)
                halved = smaller.halved(self.field.multiple_px)
                if halved is None:
                    hint = "; use --accelerator cpu" if self.device.type == "cuda" else ""
                    raise UserError(f"{self.device} has too little memory for a tile{hint}") from None
                torch.cuda.empty_cache()
                tiling = halved

    def _check_room(self, picture: ImageData) -> None:
        height, width = picture.pixels.shape[:2]
        needed = self._bytes_of_results(height, width, picture.deep)
        if picture.alpha is not None:
            needed += height * width * self.image_model.output_scale**2 * ALPHA_BYTES_PER_PX[picture.deep]
        free = free_bytes(torch.device("cpu"))
        if needed > free:
            raise BadImage(f"what is made of it needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")

    def _bytes_of_results(self, height: int, width: int, deep: bool) -> int:
        return height * width * self.image_model.output_scale**2 * BYTES_PER_PX[deep] * len(self.image_model.results)


def _is_short_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or NO_MEMORY in str(error)


def _named(task: Task) -> str:
    first, *more = task.targets.values()
    return first + (f" and {len(more)} more" if more else "")
