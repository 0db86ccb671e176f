"""Applies networks to one image on one device: reads it, processes it in tiles, and writes the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from paceline.core.errors import UserError
from paceline.core.printable import printable
from paceline.data.memory import free_bytes
from paceline.images.decode import BadImage
from paceline.images.deep_image import GREY_AND_RGB
from paceline.images.image_file import Canvas, ImageData, read_image, save_image
from paceline.inference.blending import Blend
from paceline.inference.downsampled import compare, shrink
from paceline.inference.image_model import ImageModel, open_image_model
from paceline.inference.skipped import SkippedImage
from paceline.inference.tile_error import describe_tile_error
from paceline.inference.tiling import (
    Advance,
    Pixels,
    Tiling,
    apply_in_tiles,
    choose_tiling,
    tiles_of_training_size,
    tiling_warning,
)
from paceline.parallel.precision import choose_precision

BYTES_PER_PX = 4  # memory per pixel of an 8-bit grey or RGB result
ALPHA_BYTES_PER_PX = {False: 2, True: 0}  # extra memory per pixel while an alpha channel is written; True: 16 bits
COLOURS = 3
CPU_ALLOCATOR = "DefaultCPUAllocator"  # appears in the host's out-of-memory errors on every platform


@dataclass(frozen=True)
class ApplierSettings:
    """Which model to apply, and how. Worker processes receive these settings as JSON."""

    path: str  # run folder or weights file
    checkpoint: str = "best"
    tile: int = 0
    downsample: str = ""
    panel: int = 0  # number of the square panel to process, counted from 1; 0 for the whole image
    share: float = 1.0  # the model's share in an interpolation with `other`, see `inference.blending`
    other: str = ""


@dataclass(frozen=True, eq=False)
class ImageTask:
    """An image to process, and the output file for each result name."""

    path: str
    targets: dict[str, str]


@dataclass(frozen=True)
class AppliedImage:
    """An image whose results were written."""

    path: str
    summary: str  # a line about the image, to be printed
    metrics: dict[str, float] = field(default_factory=dict)


class _Composed(NamedTuple):
    canvases: dict[str, Canvas]  # one canvas per result name
    tiling: Tiling
    num_tiles: int


class Applier:
    """Applies networks on one device to one image at a time."""

    def __init__(
        self, settings: ApplierSettings, image_model: ImageModel | None, device: torch.device, share: int = 1
    ) -> None:
        self.settings, self.device, self.share = settings, device, share
        self.image_model = image_model or open_image_model(
            settings.path, settings.checkpoint, Blend(settings.share, settings.other)
        )
        self.field = self.image_model.receptive_field  # traced on the CPU, before the weights move to the device
        self._measured_error = ""
        choose_precision("fp32", device).apply(deterministic=True)  # otherwise, tiles might not match the whole image
        self.image_model.recipe.to(device)

    def process(self, task: ImageTask, advance: Advance) -> AppliedImage | SkippedImage:
        """Apply the networks to one image and write the results. A file that cannot be used is skipped."""
        try:
            spec = self.image_model.spec
            image = self._panel_of(read_image(Path(task.path), spec.channels, spec.pixel_format))
            self._check_memory(image)
            work = self._compare if self.settings.downsample else self._write
            return work(task, image, advance)
        except BadImage as problem:
            return SkippedImage(task.path, str(problem))
        except OSError as error:
            raise UserError(
                f"--out: cannot write the results for {printable(task.path)}: {error.strerror or error}"
            ) from error

    def transform(self, pixels: Pixels) -> dict[str, Image.Image]:
        """Return the results for one 8-bit [h, w, c] image, by name."""
        canvases = self._compose(ImageData(pixels), lambda _: None).canvases
        return {name: canvas.image for name, canvas in canvases.items()}

    def _panel_of(self, image: ImageData) -> ImageData:
        """Return the panel chosen with `--panel`, or the whole image, with a note if it looks like a row of panels."""
        (height, width), number = image.pixels.shape[:2], self.settings.panel
        squares = width // height if width % height == 0 else 1
        if not number:
            if self.image_model.spec.panels and squares == len(self.image_model.spec.panels) + 1:
                hint = f"the image looks like a row of {squares} panels: use --panel 1 to process only the first"
                return replace(image, note="; ".join(filter(None, (image.note, hint))))
            return image
        if number > squares or squares < 2:
            raise BadImage(f"--panel {number}: {width}×{height} pixels is not a row of {max(number, 2)} square panels")
        left, right = (number - 1) * height, number * height
        alpha = image.alpha and image.alpha.crop((left, 0, right, height))
        return replace(image, pixels=image.pixels[:, left:right], alpha=alpha)

    def _write(self, task: ImageTask, image: ImageData, advance: Advance) -> AppliedImage:
        canvases, tiling, num_tiles = self._compose(image, advance)
        for name, canvas in canvases.items():
            target = Path(task.targets[name if name in task.targets else ""])
            target.parent.mkdir(parents=True, exist_ok=True)
            canvas.save(target, image)
        height, width = image.pixels.shape[:2]
        scale = self.image_model.output_scale
        enlarged = f" → {width * scale}×{height * scale}" if scale > 1 else ""
        tiles = f", {num_tiles} tiles of {tiling.side_px} pixels, halo {tiling.halo_px}" if num_tiles > 1 else ""
        notes = "".join(f"; {note}" for note in (tiling.note, image.note) if note)
        first, *more = task.targets.values()
        files = printable(first) + (f" and {len(more)} more" if more else "")
        return AppliedImage(task.path, f"{printable(task.path)}: {width}×{height}{enlarged}{tiles} → {files}{notes}")

    def _compare(self, task: ImageTask, image: ImageData, advance: Advance) -> AppliedImage:
        """Downsample the image, apply the networks, and compare the result with the original."""
        scale = self.image_model.output_scale
        if image.pixels.shape[-1] not in GREY_AND_RGB or image.value_range:
            raise BadImage("--downsample compares 8-bit and 16-bit images with 1 or 3 channels only")
        original, small = shrink(image, scale)
        pixels = np.asarray(small) if small.mode == "RGB" else np.asarray(small)[..., np.newaxis]
        canvases, tiling, _ = self._compose(ImageData(pixels), lambda pixels: advance(pixels * scale**2))
        images, metrics = compare(original, small, canvases["image"].image, scale, self.image_model.config.run.protocol)
        for name, result in images.items():
            target = Path(task.targets[name])
            target.parent.mkdir(parents=True, exist_ok=True)
            save_image(result, target)
        values = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        note = f"; {tiling.note}" if tiling.note else ""
        summary = f"{printable(task.path)}: {values} → {printable(task.targets[''])}{note}"
        return AppliedImage(task.path, summary, metrics)

    def _compose(self, image: ImageData, advance: Advance) -> _Composed:
        """Apply the networks in tiles; if memory runs out, try again with smaller tiles."""
        pixels = image.pixels
        height, width = pixels.shape[:2]
        at_once = 3 if pixels.shape[-1] > self.image_model.spec.channels else 1  # a grey network gets RGB as 3 images
        if self.image_model.recipe.window_px and not self.settings.tile:
            tiling = tiles_of_training_size(self.image_model.recipe.window_px, (height, width))
        else:
            tiling = self._choose_tiling(height, width, self.share * at_once, self._result_bytes(image))
            if tiling.side_px < max(height, width) and self.field.obstacles:
                tiling = replace(tiling, note=f"{tiling.note}; {self._tile_error(pixels, tiling)}")
        while True:
            canvases: dict[str, Canvas] = {}
            try:
                num_tiles = apply_in_tiles(self.image_model, pixels, tiling, self._paste_on(canvases, image), advance)
                return _Composed(canvases, tiling, num_tiles)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            torch.cuda.empty_cache()
            tiling = self._smaller(tiling, height, width)

    def _choose_tiling(self, height: int, width: int, share: int, result_bytes: int) -> Tiling:
        """Return the tiles for an image. If it needs several and their halo is not known yet, measure the halo."""
        while True:
            tiling = choose_tiling(
                self.field,
                (height, width),
                self.device,
                share=share,
                side=self.settings.tile,
                result_bytes=result_bytes,
            )
            if tiling.side_px >= max(height, width) or not self.field.is_measurable:
                return tiling
            self.field = self.image_model.tiled_field

    def _tile_error(self, pixels: Pixels, tiling: Tiling) -> str:
        """Return how much tiles change the result, measured on the first image that needs them."""
        try:
            self._measured_error = self._measured_error or describe_tile_error(
                self.image_model, self.field, pixels, tiling, self.device
            )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return "the effect of the tiles could not be measured, because memory ran out"
        return self._measured_error

    def _paste_on(
        self, canvases: dict[str, Canvas], image: ImageData
    ) -> Callable[[str, int, int, npt.NDArray[np.float32]], None]:
        height, width = (side * self.image_model.output_scale for side in image.pixels.shape[:2])

        def paste(name: str, top: int, left: int, values: npt.NDArray[np.float32]) -> None:
            canvases.setdefault(name, Canvas(height, width, image.pixel_format)).paste(top, left, values)

        return paste

    def _smaller(self, tiling: Tiling, height: int, width: int) -> Tiling:
        """Return tiles half as large; raise UserError if they cannot be smaller."""
        self.field = self.image_model.tiled_field
        side = min(tiling.side_px, max(height, width))
        exact = Tiling(side, self.field.tiled_halo_px, tiling_warning(self.field) or tiling.note)
        halved = exact.halved(self.field.multiple_px)
        if halved is None:
            hint = ": use --accelerator cpu" if self.device.type == "cuda" else ""
            raise UserError(f"{self.device}: not enough memory for the smallest tile{hint}")
        return halved

    def _check_memory(self, image: ImageData) -> None:
        height, width = image.pixels.shape[:2]
        needed = self._result_bytes(image)
        if image.alpha is not None:
            needed += height * width * self.image_model.output_scale**2 * ALPHA_BYTES_PER_PX[image.deep]
        free = free_bytes(torch.device("cpu"))
        if needed > free:
            raise BadImage(f"the results need {needed / 1e9:.1f} GB of memory, but only {free / 1e9:.1f} GB is free")

    def _result_bytes(self, image: ImageData) -> int:
        height, width, channels = image.pixels.shape
        is_plain = not image.deep and channels <= COLOURS
        bytes_per_px = BYTES_PER_PX if is_plain else max(channels, COLOURS) * image.pixels.itemsize
        return int(height * width * self.image_model.output_scale**2 * bytes_per_px * len(self.image_model.results))


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means that a device or the host ran out of memory.

    On the host, torch raises a plain RuntimeError, in which only the allocator's name is the same on every platform.
    """
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or CPU_ALLOCATOR in str(error)
