"""Applies networks to image files: reads them, computes the results on one or more devices, writes them."""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from paceline.contracts.data_spec import INPUT
from paceline.core.errors import UserError
from paceline.core.terminal import Counter
from paceline.core.text import duration, printable
from paceline.data.loader import free_bytes
from paceline.data.source import TARGET, parse_panels
from paceline.evaluation.image_metrics import PEAK, WINDOW, luma
from paceline.images.decode import BadImage, to_pillow
from paceline.images.deep import GREY_AND_RGB
from paceline.images.encode import (
    DEFAULT_ENCODING,
    Attachments,
    Encoding,
    ImageData,
    lost_in,
    read_image,
    write_image,
)
from paceline.images.grids import captioned, side_by_side
from paceline.inference.compare_images import Sums, blocks_of, levels_of
from paceline.inference.files import SkippedImage
from paceline.inference.receptive_field import ReceptiveField, receptive_field, uncounted
from paceline.inference.runner import Pixels, RunnerPool, TileRunner, in_levels
from paceline.inference.tiles import (
    Advance,
    Composer,
    Composition,
    Tiling,
    largest_side,
    plan_tiles,
    usable_bytes,
)
from paceline.inference.trained import TrainedModel


def shrink(image: ImageData, scale: int) -> tuple[Image.Image, Image.Image]:
    """Return an 8-bit copy of the image, cropped to multiples of the scale, and a downsampled copy."""
    pixels = (image.pixels >> 8).astype(np.uint8) if image.deep else image.pixels
    least = math.ceil((WINDOW + 2 * scale) / scale) * scale
    height, width = pixels.shape[:2]
    if min(height, width) < least:
        raise BadImage(f"{width}×{height} pixels; at least {least}×{least} are needed to downsample by {scale}")
    height, width = height - height % scale, width - width % scale
    cut = pixels[:height, :width]
    original = to_pillow(cut)
    return original, original.resize((width // scale, height // scale), Image.Resampling.BICUBIC)


def compare(
    original: Image.Image, small: Image.Image, made: Image.Image, scale: int, protocol: str
) -> tuple[dict[str, Image.Image], dict[str, float]]:
    """Return the images to write (the first shows all side by side), and the PSNR and SSIM of each enlarged image."""
    enlarged = {
        "lr": small.resize(original.size, Image.Resampling.NEAREST),
        "bicubic": small.resize(original.size, Image.Resampling.BICUBIC),
        "sr": made,
    }
    metrics: dict[str, float] = {}
    shown = []
    for name, image in enlarged.items():
        psnr, ssim = measure(image, original, scale, protocol)
        metrics |= {f"{name}_psnr[{protocol}]": psnr, f"{name}_ssim[{protocol}]": ssim}
        shown.append(captioned(image.convert("RGB"), f"{name}  {psnr:.2f} dB  {ssim:.4f}", room=True))
    shown.append(captioned(original.convert("RGB"), "original"))
    return {"": side_by_side(shown), "lr": small, "bicubic": enlarged["bicubic"], "sr": made}, metrics


def measure(made: Image.Image, original: Image.Image, border: int, protocol: str) -> tuple[float, float]:
    """Return PSNR and SSIM, computed in blocks; with protocol "y", only luma is compared."""
    sums, arrays = [], [np.asarray(image) for image in (made, original)]
    for block in blocks_of(original.height, original.width, border):
        one, other = (levels_of(array[block.tile.source]) for array in arrays)
        sums.append(block.sums(luma(one), luma(other), PEAK) if protocol == "y" else block.sums(one, other, PEAK))
    total = Sums.total(sums)
    return total.psnr(PEAK), total.ssim()


LARGE_HALO_PX, SMALL_HALO_PX = 1024, 256
LARGEST_PART_PX = 4096
HALOS_PER_PART = 8  # smaller parts would mostly compute halos
MEMORY_SHARE = 0.25  # of the memory that tiles may use


class _InParts(nn.Module):
    """Mixin for a network that computes parts of the images. The results are as large as the images."""

    division: Tiling

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        with uncounted():
            if max(height, width) <= self.division.side_px:
                at_once: Tensor = super().forward(images)
                return at_once
            whole: Tensor | None = None
            for tile in plan_tiles(self.division, (height, width)):
                made = super().forward(images[..., *tile.source])
                whole = made.new_empty((*made.shape[:2], height, width)) if whole is None else whole
                whole[..., *tile.target(1)] = made[..., *tile.inner(1)]
            assert whole is not None
            return whole


@cache
def _class_in_parts(network: type[nn.Module]) -> type[nn.Module]:
    return type(network.__name__, (_InParts, network), {})


def compute_in_parts(image_model: TrainedModel, device: torch.device) -> ReceptiveField:
    """Compute networks with a small halo in parts if the model's halo is large; return the model's receptive field.

    The networks must still be on the CPU.
    """
    field, channels = image_model.receptive_field, image_model.spec.channels
    if field.obstacles or field.halo_px < LARGE_HALO_PX:
        return field
    for network in _networks(image_model.recipe):
        if any(id(weight) in field.used for weight in network.parameters()):
            division = _parts_of(network, channels, device)
            if division:
                kind: Any = type(network)
                network.__class__ = _class_in_parts(kind)
                network.division = division  # type: ignore[assignment]
    return receptive_field(image_model.recipe.image_to_image, channels, image_model.output_scale)


def _networks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the networks of a recipe, including those in a ModuleDict or ModuleList."""
    for child in module.children():
        if isinstance(child, nn.ModuleDict | nn.ModuleList):
            yield from _networks(child)
        else:
            yield child


def _parts_of(network: nn.Module, channels: int, device: torch.device) -> Tiling | None:
    """Return how a network's images are divided; None if its halo is not small, or if parts would not fit in memory."""
    own = receptive_field(lambda images: {"": network(images)}, channels)
    side = min(LARGEST_PART_PX, largest_side(own, usable_bytes(device) * MEMORY_SHARE, own.tiled_halo_px))
    if own.obstacles or own.halo_px > SMALL_HALO_PX or side < HALOS_PER_PART * own.tiled_halo_px:
        return None
    return Tiling(side // own.multiple_px * own.multiple_px, own.tiled_halo_px)


BYTES_PER_PX = 4  # memory per pixel of an 8-bit grey or RGB result
ALPHA_BYTES_PER_PX = {False: 2, True: 11}  # extra memory per pixel while an alpha channel is written; True: 16 bits
COLOURS = 3


@dataclass(frozen=True)
class ApplierSettings:
    """How to apply a model."""

    tile: int = 0
    downsample: str = ""
    # Number of the square panel to process, counted from 1; 0 for the whole image; None if the user did not choose.
    panel: int | None = 0
    precision: str = "fp32"
    compiled: bool = False
    encoding: Encoding = DEFAULT_ENCODING


@dataclass(frozen=True, eq=False)
class ImageTask:
    """An image to process, and its output files."""

    path: str
    targets: dict[str, str]  # by the name of the result
    previews: dict[str, str] = field(default_factory=dict)  # by the name of the result; written with `--preview`
    mask: str = ""  # written with `--skip-background`

    @property
    def files(self) -> list[str]:
        """All output files."""
        return [*self.targets.values(), *self.previews.values(), *([self.mask] if self.mask else [])]

    @property
    def shown_targets(self) -> str:
        """The first result's file and the number of others, to be printed."""
        first, *more = self.targets.values()
        return printable(first) + (f" and {len(more)} more" if more else "")

    def make_target(self, result: str) -> Path:
        """Return the file for a result, and create its folder."""
        target = Path(self.targets[result if result in self.targets else ""])
        target.parent.mkdir(parents=True, exist_ok=True)
        return target


@dataclass(frozen=True)
class AppliedImage:
    """An image whose results were written."""

    path: str
    summary: str  # a line about the image, to be printed
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class OpenedImage:
    """A decoded image, with the pixels that the networks will see."""

    task: ImageTask
    image: ImageData
    pixels: Pixels
    original: Image.Image | None = None  # what `--downsample` compares the result with


@dataclass(frozen=True, eq=False)
class ComputedImage:
    """An image whose results are computed, or are being computed by a GPU."""

    opened: OpenedImage
    composition: Composition


class Applier:
    """Applies an image model. Its methods are the stages of a pipeline and may run in different threads."""

    def __init__(self, settings: ApplierSettings, image_model: TrainedModel, devices: list[torch.device]) -> None:
        self.settings, self.image_model = settings, image_model
        # The receptive field is traced on the CPU, before the weights move to a device. A compiler would unroll parts.
        in_parts = devices[0].type == "cuda" and not settings.compiled
        field = compute_in_parts(image_model, devices[0]) if in_parts else image_model.receptive_field
        copies = [image_model]
        copies += [replace(image_model, recipe=copy.deepcopy(image_model.recipe)) for _ in devices[1:]]
        self.pool = RunnerPool(
            [
                TileRunner(model, device, settings.precision, compiled=settings.compiled)
                for model, device in zip(copies, devices, strict=True)
            ]
        )
        num_sharing = len(devices) if devices[0].type == "cpu" else 1  # of one memory
        self.composer = Composer(self.pool, field, settings.tile, num_sharing)
        self._reported: set[str] = set()
        self._is_difference_known = False  # of the precision from fp32, measured on the first image

    def open(self, task: ImageTask) -> OpenedImage | SkippedImage:
        """Read an image. A file that cannot be used is skipped."""
        try:
            spec = self.image_model.spec
            image = self._panel_of(read_image(Path(task.path), spec.channels, spec.pixel_format))
            self._check_memory(image)
            if not self.settings.downsample:
                return OpenedImage(task, image, image.pixels)
            if image.pixels.shape[-1] not in GREY_AND_RGB or image.value_range:
                raise BadImage("--downsample compares 8-bit and 16-bit images with 1 or 3 channels only")
            original, small = shrink(image, self.image_model.output_scale)
            pixels = np.asarray(small) if small.mode == "RGB" else np.asarray(small)[..., np.newaxis]
            return OpenedImage(task, image, pixels, original)
        except BadImage as problem:
            return SkippedImage(task.path, str(problem))

    def compute(self, images: list[OpenedImage], advance: Advance) -> list[ComputedImage]:
        """Start computing the results of images of one shape."""
        factor = self.image_model.output_scale**2 if self.settings.downsample else 1
        compositions = self.composer.compose(
            [image.pixels for image in images],
            self.result_bytes(images[0].pixels),
            lambda pixels: advance(pixels * factor),
        )
        if self.measures_difference:
            first, side = compositions[0], compositions[0].tiling.side_px
            where = "this image" if first.num_tiles == 1 else "the first tile"
            first.note = self.describe_difference(images[0].pixels[:side, :side], where)
        return list(map(ComputedImage, images, compositions))

    def write(self, computed: ComputedImage) -> AppliedImage | SkippedImage:
        """Write an image's results. If they are not finite, the image is skipped."""
        task = computed.opened.task
        try:
            return self._write_comparison(computed) if self.settings.downsample else self._write_results(computed)
        except BadImage as problem:
            return SkippedImage(task.path, str(problem))
        except OSError as error:
            raise UserError(
                f"--out: cannot write the results for {printable(task.path)}: {error.strerror or error}"
            ) from error

    def new_notes(self) -> list[str]:
        """Return remarks about the devices' work that no earlier call returned."""
        notes = dict.fromkeys(note for runner in self.pool.runners for note in runner.notes)
        new = [note for note in notes if note not in self._reported]
        self._reported.update(new)
        return new

    def _panel_of(self, image: ImageData) -> ImageData:
        """Return the panel chosen with `--panel`; raise BadImage if the user must choose, or the image has none."""
        (height, width), number = image.pixels.shape[:2], self.settings.panel
        squares = width // height if width % height == 0 else 1
        names = parse_panels(str(self.image_model.config.values().get("panels", ""))) or (INPUT, TARGET)
        if number is None and self.image_model.spec.panels and (squares > 2 or squares == len(names)):
            raise BadImage(
                f"{width}×{height} pixels looks like a row of {squares} panels: use --panel {names.index(INPUT) + 1} "
                "for the input alone, or --panel 0 for the whole image"
            )
        if not number:
            return image
        if number > squares or squares < 2:
            raise BadImage(f"--panel {number}: {width}×{height} pixels is not a row of {max(number, 2)} square panels")
        left, right = (number - 1) * height, number * height
        # Pillow's `crop` rejects large panels.
        alpha = None if image.alpha is None else Image.fromarray(np.asarray(image.alpha)[:, left:right])
        return replace(image, pixels=image.pixels[:, left:right], alpha=alpha)

    def _write_results(self, computed: ComputedImage) -> AppliedImage:
        task, image, composition = computed.opened.task, computed.opened.image, computed.composition
        attached = Attachments(image.alpha, image.profile, image.exif, image.ome)
        lost = ""
        for name, pixels in composition.results().items():
            target = task.make_target(name)
            write_image(target, pixels, self.settings.encoding, attached)
            lost = lost_in(target.suffix, pixels, attached)
        height, width = image.pixels.shape[:2]
        scale, tiling = self.image_model.output_scale, composition.tiling
        enlarged = f" → {width * scale}×{height * scale}" if scale > 1 else ""
        num_tiles = composition.num_tiles
        tiles = f", {num_tiles} tiles of {tiling.side_px} pixels, halo {tiling.halo_px}" if num_tiles > 1 else ""
        notes = "".join(f"; {note}" for note in (tiling.note, image.note, composition.note, lost) if note)
        return AppliedImage(
            task.path, f"{printable(task.path)}: {width}×{height}{enlarged}{tiles} → {task.shown_targets}{notes}"
        )

    def _write_comparison(self, computed: ComputedImage) -> AppliedImage:
        """Compare the result with the original image, and write both."""
        task, original, composition = computed.opened.task, computed.opened.original, computed.composition
        assert original is not None
        scale, protocol = self.image_model.output_scale, self.image_model.config.run.protocol
        small, made = (to_pillow(pixels) for pixels in (computed.opened.pixels, composition.results()["image"]))
        images, metrics = compare(original, small, made, scale, protocol)
        for name, result in images.items():
            pixels = np.asarray(result)
            pixels = pixels if pixels.ndim == 3 else pixels[..., np.newaxis]
            write_image(task.make_target(name), pixels, self.settings.encoding)
        values = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        notes = "".join(f"; {note}" for note in (composition.tiling.note, composition.note) if note)
        summary = f"{printable(task.path)}: {values} → {printable(task.targets[''])}{notes}"
        return AppliedImage(task.path, summary, metrics)

    @property
    def measures_difference(self) -> bool:
        """Whether to measure the difference from fp32: once, for the first image, unless the precision is fp32."""
        return self.settings.precision != "fp32" and not self._is_difference_known

    def describe_difference(self, pixels: Pixels, where: str) -> str:
        """Describe how much the precision changes the results for these pixels."""
        self._is_difference_known = True
        levels = self.pool.runners[0].difference_from_fp32(pixels)
        return f"{self.settings.precision} changes {where} by at most {in_levels(levels)} of 255 levels"

    def _check_memory(self, image: ImageData) -> None:
        height, width = image.pixels.shape[:2]
        needed = self.result_bytes(image.pixels)
        if image.alpha is not None:
            needed += height * width * self.image_model.output_scale**2 * ALPHA_BYTES_PER_PX[image.deep]
        free = free_bytes(torch.device("cpu"))
        if needed > free:
            raise BadImage(f"the results need {needed / 1e9:.1f} GB of memory, but only {free / 1e9:.1f} GB is free")

    def result_bytes(self, pixels: Pixels) -> int:
        """Return the memory that the results for an image need."""
        height, width, channels = pixels.shape
        is_plain = pixels.dtype == np.uint8 and channels <= COLOURS
        bytes_per_px = BYTES_PER_PX if is_plain else max(channels, COLOURS) * pixels.itemsize
        return int(height * width * self.image_model.output_scale**2 * bytes_per_px * len(self.image_model.results))


class ApplyProgress(Counter):
    """Counts the pixels processed, and shows the speed and the remaining time."""

    def __init__(self, total: int) -> None:
        super().__init__("applying", total)
        self._total_px, self._earlier, self._start, self._lock = total, 0, time.monotonic(), threading.Lock()

    def advance(self, pixels: int, *, earlier: bool = False) -> None:
        """Count this many more pixels as processed. May be called by several threads.

        Pixels that an `earlier` command has processed do not count for the speed.
        """
        with self._lock:
            self._earlier += pixels * earlier
            self.update(self.done + pixels)

    def describe(self) -> str:
        """Return how much is done, how fast, and how long the rest takes."""
        speed = (self.done - self._earlier) / max(time.monotonic() - self._start, 1e-9)
        done = f"applying: {self.done / max(self._total_px, 1):.0%} of {self._total_px / 1e6:,.3g} megapixels"
        left = f", {duration((self._total_px - self.done) / speed)} left" if speed else ""
        return f"{done}, {speed / 1e6:.3g} megapixels/s{left}"
