"""A run's sample images: a grid of generated images, or strips of input, output and target for fixed samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from paceline.contracts.data_spec import EIGHT_BITS, PixelFormat
from paceline.contracts.recipe import CLASS_DRAW, Batch, DataSpec, Recipe
from paceline.core.errors import UserError
from paceline.data.source import Source, sizes_of, without_empty_classes
from paceline.data.stream import Drawer, to_eight_bits, to_pixels, transform
from paceline.images.deep import to_eight_bit_array
from paceline.images.grids import ShownChannels, captioned, grid, side_by_side, to_image
from paceline.images.rectangles import Box
from paceline.parallel.precision import Precision
from paceline.runs.logger import Pixels
from paceline.runs.tensor_files import HostCopy
from paceline.training.build import Parts
from paceline.training.compile import eager

NUM_SAMPLES = 64  # images per grid
NUM_LARGE_REAL = 16  # number of real images if they are large, because decoding them takes long
LARGE_PX = 128
IMAGES_AT_ONCE = 64
NUM_STRIPS = 4
LARGEST_SIDE_PX = 256
MULTIPLE_PX = 8  # sides of crops are multiples of this, so that every scale divides them


class Previews:
    """The sample images of a run, always computed from the same noise or samples."""

    def __init__(self, parts: Parts) -> None:
        """Prepare the inputs; strips and real images show the split that is evaluated."""
        self._recipe, self._precision, spec = parts.recipe, parts.precision, parts.trained_spec()
        self._source = parts.loaders.get(parts.recipe.evaluation.split, parts.loaders["train"]).source
        self._channels = ShownChannels.parse(parts.config.run.preview_channels, self._source.spec.channels)
        self._generated_shape: tuple[int, ...] | None = None  # height, width and channels of generated images
        self._draws: Batch = {}
        self._samples: list[Batch] = []
        drawer = parts.feed.drawer
        if self._recipe.generates:
            self._draws = fixed_draws(self._recipe, drawer, spec, NUM_SAMPLES)
        elif has_strips(self._recipe):
            self._samples = strip_samples(self._source, drawer, self._precision, spec)

    def __bool__(self) -> bool:
        """Return whether the recipe has sample images."""
        return bool(self._draws or self._samples)

    def render(self) -> Callable[[], Pixels]:
        """Compute the recipe's current images; return a function that arranges them in a single uint8 [h, w, c] image.

        Nothing waits for the device until the function is called, which another thread may do.
        """
        channels = self._channels
        if self._recipe.generates:
            made = _generate(self._recipe, self._draws, self._precision)
            self._generated_shape = tuple(made.shape[1:])
            images = HostCopy({"image": made})
            return lambda: grid(channels.of(images.wait()["image"].numpy()))
        strips = _predict_strips(self._recipe, self._samples, self._precision)
        return lambda: np.asarray(_arrange_strips(strips, channels))

    def real(self) -> Callable[[], Pixels] | None:
        """Read real images with the size of the generated images; return a function that arranges them in a grid.

        Return None if there are none.
        """
        if self._generated_shape is None:
            return None
        crops, channels = real_crops(self._source, *self._generated_shape), self._channels
        return None if crops is None else lambda: grid(channels.of(crops))


def make_images(recipe: Recipe, draws: Batch, precision: Precision, pixels: PixelFormat = EIGHT_BITS) -> NDArray[Any]:
    """Return one generated image per row of random inputs, as an [n, h, w, c] array of pixels."""
    return _generate(recipe, draws, precision, pixels).cpu().numpy()


@torch.no_grad()
def _generate(recipe: Recipe, draws: Batch, precision: Precision, pixels: PixelFormat = EIGHT_BITS) -> Tensor:
    was_training = recipe.training
    recipe.eval()
    images = []
    for start in range(0, len(next(iter(draws.values()))), IMAGES_AT_ONCE):
        with eager(), precision.autocast():
            rows = {name: values[start : start + IMAGES_AT_ONCE] for name, values in draws.items()}
            images.append(to_pixels(recipe.predict(rows)["image"], pixels))
    recipe.train(was_training)
    return torch.cat(images).permute(0, 2, 3, 1)


def fixed_draws(recipe: Recipe, drawer: Drawer, spec: DataSpec, count: int, first: int = 0) -> Batch:
    """Return the random inputs for a run's sample images, which are the same during and after training.

    They select no class without training images.
    """
    if not recipe.generates:
        raise UserError(f"{type(recipe).__name__} has no generator: it cannot generate images from noise")
    draws = drawer.rows("samples", first, first + count)
    if CLASS_DRAW in recipe.draws:
        draws[CLASS_DRAW] = without_empty_classes(draws[CLASS_DRAW], spec)
    return draws


def real_crops(source: Source, height: int, width: int, channels: int) -> np.ndarray | None:
    """Return centre crops of samples from all parts of a source, as a uint8 [n, h, w, c] array.

    Return None if the samples are smaller, have a different number of channels, or cannot be read.
    """
    count = min(len(source), NUM_SAMPLES if max(height, width) <= LARGE_PX else NUM_LARGE_REAL)
    indices = np.linspace(0, len(source) - 1, count).astype(int).tolist()
    sizes, crops = sizes_of(source), []
    for index in indices:
        top, left = ((int(side) - inner) // 2 for side, inner in zip(sizes[index], (height, width), strict=True))
        if min(top, left) < 0:
            return None
        try:
            image = source.read_window(index, Box(top, left, height, width)).get("image")
        except (UserError, OSError):  # training reports damaged files
            return None
        if image is None or image.shape != (height, width, channels):
            return None
        crops.append(to_eight_bit_array(image, source.spec.pixel_format))
    return np.stack(crops) if crops else None


def has_strips(recipe: Recipe) -> bool:
    """Return whether the recipe overrides `preview`."""
    return type(recipe).preview is not Recipe.preview


def strip_samples(source: Source, drawer: Drawer, precision: Precision, spec: DataSpec) -> list[Batch]:
    """Return samples from all parts of a source, one per batch, with their random inputs.

    Images of the size that the networks are trained on, given by `spec`, are whole, since a network may support no
    other size. Centre crops are taken from other images.
    """
    count, sizes = len(source), sizes_of(source)
    indices = np.linspace(0, count - 1, min(count, NUM_STRIPS)).astype(int).tolist()  # classes are often in order
    whole = (spec.height, spec.width)
    windows = [_centre_window(height, width, whole) for height, width in sizes[indices].tolist()]
    samples = [_read(source, *pair, drawer.generator.device, precision) for pair in zip(indices, windows, strict=True)]
    return [sample | drawer.rows("samples", number, number + 1) for number, sample in enumerate(samples)]


def _centre_window(height: int, width: int, whole: tuple[int, int]) -> Box:
    if (height, width) == whole:
        return Box(0, 0, height, width)
    sides = [min(side, LARGEST_SIDE_PX) for side in (height, width)]
    rows, columns = (side - side % MULTIPLE_PX if side > MULTIPLE_PX else side for side in sides)
    top, left = ((side - inner) // 2 // MULTIPLE_PX * MULTIPLE_PX for side, inner in ((height, rows), (width, columns)))
    return Box(top, left, rows, columns)


def _read(source: Source, index: int, window: Box, device: torch.device, precision: Precision) -> Batch:
    sample = source.read_window(index, window)
    raw = {name: torch.from_numpy(np.ascontiguousarray(field))[None].to(device) for name, field in sample.items()}
    images = {name: field.permute(0, 3, 1, 2) if field.ndim == 4 else field for name, field in raw.items()}
    images["uniforms"] = torch.empty(1, 0)  # no random numbers, so no augmentation
    return transform(images, None, precision.weights, source.spec.pixel_format)


def make_strips(recipe: Recipe, samples: list[Batch], precision: Precision, channels: ShownChannels) -> Image.Image:
    """Return one strip of captioned images per sample, stacked vertically."""
    return _arrange_strips(_predict_strips(recipe, samples, precision), channels)


@torch.no_grad()
def _predict_strips(recipe: Recipe, samples: list[Batch], precision: Precision) -> list[HostCopy]:
    """Return the images of each strip, by caption."""
    recipe.eval()
    strips = []
    for sample in samples:
        with eager(), precision.autocast():
            shown = recipe.preview(sample)
        if not isinstance(shown, dict) or not shown or any(getattr(made, "ndim", 0) != 4 for made in shown.values()):
            raise UserError(f"{type(recipe).__name__}.preview: returned no images: return {{caption: [n, c, h, w]}}")
        strips.append(HostCopy({name: to_eight_bits(made)[0].permute(1, 2, 0) for name, made in shown.items()}))
    recipe.train()
    return strips


def _arrange_strips(strips: list[HostCopy], channels: ShownChannels) -> Image.Image:
    rows = []
    for strip in strips:
        images = {name: made.numpy() for name, made in strip.wait().items()}
        rows.append(
            side_by_side([captioned(to_image(channels.of(one)), name, room=True) for name, one in images.items()])
        )
    return side_by_side(rows, vertical=True)
