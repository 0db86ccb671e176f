"""Applies networks to image files: reads them, computes the results on one or more devices, writes them."""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from PIL import Image

from paceline.contracts.data_spec import INPUT
from paceline.core.errors import UserError
from paceline.core.ordered_map import ByteBudget, num_cores, ordered_map
from paceline.core.terminal import Counter
from paceline.core.text import duration, printable
from paceline.data.loader import free_bytes
from paceline.data.source import TARGET, parse_panels
from paceline.evaluation.image_metrics import PEAK, WINDOW, luma
from paceline.images.decode import BadImage, to_pillow
from paceline.images.deep import GREY_AND_RGB
from paceline.images.encode import DEFAULT_ENCODING, Attachments, Encoding, ImageData, lost_in, read_image, write_image
from paceline.images.grids import captioned, side_by_side
from paceline.inference.compare_images import Sums, blocks_of, levels_of
from paceline.inference.files import ImageTask, SkippedImage
from paceline.inference.tiles import BATCH_PX, Advance, Composer, Composition, Pixels, RunnerPool, TileRunner
from paceline.inference.trained import TrainedModel

DOWNSAMPLED = ("", "lr", "bicubic", "sr")  # the results with `--downsample`; the first shows all images side by side


def shrink(image: ImageData, scale: int) -> tuple[Pixels, ImageData]:
    """Return an 8-bit copy of an image, cropped to multiples of the scale, and a downsampled copy."""
    if image.pixels.shape[-1] not in GREY_AND_RGB or image.value_range:
        raise BadImage("--downsample compares 8-bit and 16-bit images with 1 or 3 channels only")
    pixels = (image.pixels >> 8).astype(np.uint8) if image.deep else image.pixels
    (height, width), least = pixels.shape[:2], math.ceil((WINDOW + 2 * scale) / scale) * scale
    if min(height, width) < least:
        raise BadImage(f"{width}×{height} pixels; at least {least}×{least} are needed to downsample by {scale}")
    pixels = pixels[: height - height % scale, : width - width % scale]
    size = (pixels.shape[1] // scale, pixels.shape[0] // scale)
    return pixels, ImageData(to_pixels(to_pillow(pixels).resize(size, Image.Resampling.BICUBIC)))


def compare(original: Pixels, small: Pixels, made: Pixels, scale: int, protocol: str) -> tuple[dict[str, Pixels], str]:
    """Return the images to write, by the names in DOWNSAMPLED, and the metrics of each enlarged image as a text."""
    size, shown, metrics = (original.shape[1], original.shape[0]), [], []
    enlarged = {
        "lr": to_pixels(to_pillow(small).resize(size, Image.Resampling.NEAREST)),
        "bicubic": to_pixels(to_pillow(small).resize(size, Image.Resampling.BICUBIC)),
        "sr": made,
    }
    for name, pixels in enlarged.items():
        sums = []
        for block in blocks_of(original.shape[0], original.shape[1], scale):
            one, other = (levels_of(array[block.tile.area.slices]) for array in (pixels, original))
            pair = (luma(one), luma(other)) if protocol == "y" else (one, other)
            sums.append(block.sums(*pair, PEAK))
        psnr, ssim = Sums.total(sums).psnr(PEAK), Sums.total(sums).ssim()
        metrics.append(f"{name}_psnr[{protocol}] {psnr:.4f}, {name}_ssim[{protocol}] {ssim:.4f}")
        shown.append(captioned(to_pillow(pixels).convert("RGB"), f"{name}  {psnr:.2f} dB  {ssim:.4f}", room=True))
    shown.append(captioned(to_pillow(original).convert("RGB"), "original"))
    return {**enlarged, "": to_pixels(side_by_side(shown)), "lr": small}, ", ".join(metrics)


def to_pixels(image: Image.Image) -> Pixels:
    """Return a Pillow image as pixels [h, w, c]."""
    pixels = np.asarray(image)
    return pixels if pixels.ndim == 3 else pixels[..., np.newaxis]


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


@dataclass(frozen=True)
class AppliedImage:
    """An image whose results were written."""

    summary: str  # a line about the image, to be printed


@dataclass(frozen=True, eq=False)
class OpenedImage:
    """A decoded image."""

    task: ImageTask
    image: ImageData
    original: Pixels | None = None  # what `--downsample` compares the result with


@dataclass(frozen=True, eq=False)
class ComputedImage:
    """An image whose results are computed, or are being computed by a GPU."""

    opened: OpenedImage
    composition: Composition


class Applier:
    """Applies an image model. Its methods are the stages of a pipeline and may run in different threads."""

    def __init__(self, settings: ApplierSettings, image_model: TrainedModel, devices: list[torch.device]) -> None:
        self.settings, self.image_model = settings, image_model
        field = image_model.receptive_field  # traced on the CPU, before the weights move to a device
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

    def open(self, task: ImageTask) -> OpenedImage | SkippedImage:
        """Read an image. A file that cannot be used is skipped."""
        try:
            spec = self.image_model.spec
            image = self._panel_of(read_image(Path(task.path), spec.channels, spec.pixel_format))
            self._check_memory(image)
            if self.settings.downsample:
                original, small = shrink(image, self.image_model.output_scale)
                return OpenedImage(task, small, original)
            return OpenedImage(task, image)
        except BadImage as problem:
            return SkippedImage(task.path, str(problem))

    def compute(self, images: list[OpenedImage], advance: Advance) -> list[ComputedImage]:
        """Start computing the results of images of one shape."""
        pixels = [opened.image.pixels for opened in images]
        factor = self.image_model.output_scale**2 if self.settings.downsample else 1
        compositions = self.composer.compose(pixels, self.result_bytes(pixels[0]), lambda px: advance(px * factor))
        return list(map(ComputedImage, images, compositions))

    def write(self, computed: ComputedImage) -> AppliedImage | SkippedImage:
        """Write an image's results. If they are not finite, the image is skipped."""
        task, image, composition = computed.opened.task, computed.opened.image, computed.composition
        attached, lost = Attachments(image.alpha, image.profile, image.exif, image.ome), ""
        scale, protocol, metrics = self.image_model.output_scale, self.image_model.config.run.protocol, ""
        try:
            results, original = composition.results(), computed.opened.original
            if original is not None:
                results, metrics = compare(original, image.pixels, results["image"], scale, protocol)
            for name, pixels in results.items():
                target = task.make_target(name)
                write_image(target, pixels, self.settings.encoding, attached)
                lost = lost_in(target.suffix, pixels, attached)
        except BadImage as problem:
            return SkippedImage(task.path, str(problem))
        except OSError as error:
            raise UserError(
                f"--out: cannot write the results for {printable(task.path)}: {error.strerror or error}"
            ) from error
        tiling, num_tiles = composition.tiling, composition.num_tiles
        if metrics:
            note = f"; {tiling.note}" * bool(tiling.note)
            return AppliedImage(f"{printable(task.path)}: {metrics} → {printable(task.targets[''])}{note}")
        tiles = f", {num_tiles} tiles of {tiling.side_px} pixels, halo {tiling.halo_px}" if num_tiles > 1 else ""
        return AppliedImage(self.summarise(task, image.pixels.shape[:2], tiles, (tiling.note, image.note, lost)))

    def summarise(self, task: ImageTask, size: tuple[int, ...], tiles: str, notes: Iterable[str]) -> str:
        """Return a line about an image of this height and width, for the user."""
        (height, width), scale = size, self.image_model.output_scale
        enlarged = f" → {width * scale}×{height * scale}" if scale > 1 else ""
        remarks = "".join(f"; {note}" for note in notes if note)
        return f"{printable(task.path)}: {width}×{height}{enlarged}{tiles} → {task.shown_targets}{remarks}"

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


MAX_RESULT_BYTES, SHARE_OF_FREE = 2_000_000_000, 0.25  # for results that are being computed or written
MAX_INPUT_BYTES = 500_000_000  # for decoded images that wait to be processed
MOST_IMAGES_AT_ONCE = 64

Outcome: TypeAlias = AppliedImage | SkippedImage


def apply_whole(applier: Applier, num_pixels: Mapping[ImageTask, int], advance: Advance) -> Iterator[Outcome]:
    """Yield the outcome of images that are read as a whole, in order; `num_pixels` has the size of each."""
    budget = ByteBudget(min(MAX_RESULT_BYTES, int(free_bytes(torch.device("cpu")) * SHARE_OF_FREE)))
    cores = num_cores()

    def compute(numbered: tuple[int, list[OpenedImage] | SkippedImage]) -> list[ComputedImage | SkippedImage]:
        turn, group = numbered
        if isinstance(group, SkippedImage):
            budget.take(0, turn)
            return [group]
        size = sum(applier.result_bytes(opened.image.pixels) for opened in group)
        budget.take(size, turn)
        try:
            return [*applier.compute(group, advance)]
        except BaseException:
            budget.give_back(size)
            raise

    def write(computed: ComputedImage | SkippedImage) -> Outcome:
        if isinstance(computed, SkippedImage):
            return computed
        try:
            return applier.write(computed)
        finally:
            budget.give_back(applier.result_bytes(computed.opened.image.pixels))

    opened = ordered_map(
        applier.open,
        num_pixels,
        cores,
        num_bytes=lambda task: num_pixels[task] * BYTES_PER_PX,
        max_bytes=MAX_INPUT_BYTES,
    )
    groups = _groups(opened, MOST_IMAGES_AT_ONCE if applier.composer.batches_images else 1)
    computed = ordered_map(compute, enumerate(groups), len(applier.pool.runners), stop=budget.close)
    written = ordered_map(write, _flattened(computed), cores)
    try:
        yield from written
    finally:  # close the stages in this order, so that none waits for another
        written.close()
        computed.close()
        opened.close()


def _flattened(lists: Iterable[list[ComputedImage | SkippedImage]]) -> Iterator[ComputedImage | SkippedImage]:
    """Yield the elements of lists, releasing each element after use."""
    for some in lists:
        some.reverse()
        while some:
            yield some.pop()


def _groups(images: Iterable[OpenedImage | SkippedImage], most: int) -> Iterator[list[OpenedImage] | SkippedImage]:
    """Yield consecutive images of one shape together, as long as they are small; `most` limits their number."""
    group: list[OpenedImage] = []
    for opened in images:
        if group and (isinstance(opened, SkippedImage) or not _fits(group, opened.image.pixels, most)):
            yield group
            group = []
        if isinstance(opened, SkippedImage):
            yield opened
        else:
            group.append(opened)
    if group:
        yield group


def _fits(group: list[OpenedImage], pixels: Pixels, most: int) -> bool:
    first, (height, width) = group[0].image.pixels, pixels.shape[:2]
    is_alike = (first.shape, first.dtype) == (pixels.shape, pixels.dtype)
    return len(group) < most and (len(group) + 1) * height * width <= BATCH_PX and is_alike
