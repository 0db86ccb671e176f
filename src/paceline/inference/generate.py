"""Images from a run: generated, interpolated, over the course of training, with the nearest real images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from paceline.config.resolve import Config
from paceline.config.settings import RunSettings
from paceline.contracts.recipe import CLASS_DRAW, Batch, DataSpec, Recipe
from paceline.core.errors import UserError
from paceline.core.ordered_map import num_cores, ordered_map
from paceline.core.terminal import Counter
from paceline.data.source import Source, has_one_size, open_sources, sizes_of
from paceline.data.stream import Augment, Drawer
from paceline.evaluation.features import choose_features
from paceline.images.decode import BadImage, decode
from paceline.images.deep import to_eight_bit_array
from paceline.images.encode import Encoding, write_image
from paceline.images.grids import ShownChannels, captioned, grid, side_by_side, to_image
from paceline.inference.model import (
    Model,
    choose_class,
    class_index,
    is_every_class,
    trained_classes,
    truncate_draws,
)
from paceline.inference.trained import StoredModel, check_use, open_trained, read_stored
from paceline.parallel.precision import choose_precision
from paceline.parallel.world import join
from paceline.runs.finished_run import open_run, readable_config_of
from paceline.runs.metrics import SAMPLES
from paceline.runs.recipe import check_sources
from paceline.runs.weights import is_weights_file
from paceline.training.previews import fixed_draws, has_strips, make_images, make_strips, strip_samples


def interpolate_draws(recipe: Recipe, ends: Batch, steps: int) -> Batch:
    """Interpolate between random inputs in each pair of rows: spherically if normally distributed, else linearly.

    All images between two rows have the class of the first one.
    """
    shares = torch.linspace(0, 1, steps)
    between = {}
    for name, rows in ends.items():
        if name == CLASS_DRAW:  # classes cannot be interpolated
            between[name] = rows[::2].repeat_interleave(steps)
            continue
        interpolate = slerp if recipe.draws[name].kind == "normal" else torch.lerp
        flat = rows.reshape(len(rows), -1).double()
        pairs = zip(flat[::2], flat[1::2], strict=True)
        moved = torch.stack([torch.stack([interpolate(a, b, share.to(a)) for share in shares]) for a, b in pairs])
        between[name] = moved.to(rows.dtype).reshape(-1, *rows.shape[1:])
    return between


def slerp(start: Tensor, end: Tensor, share: Tensor) -> Tensor:
    """Return the point a given fraction along the arc between two vectors (spherical linear interpolation)."""
    angle = torch.arccos((start @ end / (start.norm() * end.norm())).clamp(-1, 1))
    if not angle.sin().abs() >= 1e-6:  # the vectors are parallel, or one is 0 (NaN), so interpolate linearly
        return torch.lerp(start, end, share)
    return (((1 - share) * angle).sin() * start + (share * angle).sin() * end) / angle.sin()


COMPARED_AT_ONCE = 500


def with_nearest(
    images: NDArray[np.uint8], source: Source, count: int, settings: RunSettings, device: torch.device
) -> NDArray[np.uint8]:
    """Return each uint8 [h, w, c] image followed by the `count` training images with the nearest features.

    `source` contains at least `count` images.
    """
    if not has_one_size(source) or tuple(sizes_of(source)[0]) != images.shape[1:3]:
        raise UserError(f"--nearest: the run trains on crops of the images in {settings.data}; leave --nearest out")
    network = choose_features(settings, source.spec, device, open_run)

    def features(some: NDArray[np.uint8]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(some)).to(device).permute(0, 3, 1, 2)
        return network(tensor, "fp32").vectors.double()

    def training_images(numbers: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return images by number: first all training images, then their mirror images."""
        found = to_eight_bit_array(source.read_many(numbers % len(source))["image"], source.spec.pixel_format)
        return np.where((numbers < len(source))[:, None, None, None], found, found[:, :, ::-1])

    own, nearer = features(images), []
    num_variants = 2 if Augment.from_settings(settings, source.spec).flip else 1
    with torch.no_grad(), Counter("comparing with the training images", len(source)) as counter:
        for start in range(0, len(source), COMPARED_AT_ONCE):
            part = np.arange(start, min(start + COMPARED_AT_ONCE, len(source)))
            variants = [features(training_images(part + number * len(source))) for number in range(num_variants)]
            nearer.append(torch.stack([torch.cdist(own, variant) for variant in variants]).min(dim=0))
            counter.update(int(part[-1]) + 1)
    distances, variant = torch.cat([each.values for each in nearer], 1), torch.cat([each.indices for each in nearer], 1)
    best = distances.topk(count, dim=1, largest=False).indices
    chosen = best + variant.gather(1, best) * len(source)
    rows = [
        np.concatenate([image[None], training_images(near)])
        for image, near in zip(images, chosen.cpu().numpy(), strict=True)
    ]
    return np.concatenate(rows)


@dataclass(frozen=True)
class GridOptions:
    """The layout of a grid of generated images."""

    rows: int
    columns: int
    interpolate: bool  # each row interpolates between two images
    flag: str  # the flag that requested a grid; empty if none did
    label: str = ""  # class of the images, "all" for one class per row, or "" for random classes
    truncation: float = 1.0  # factor on the noise
    nearest: bool = False  # each row shows an image and the training images that are most similar to it
    data_root: str = ""  # where the run's data is now


def show_run(run: str, config: Config, checkpoint: str, options: GridOptions) -> tuple[Image.Image, str]:
    """Return a grid or strips from a run or weights file, and a caption that names the file or the run's checkpoint."""
    world = join(config.run, distributed=False)
    precision = choose_precision(config.run.precision, world.device)
    precision.apply(deterministic=config.run.deterministic)
    stored = replace(read_stored(run, checkpoint), config=config)
    caption = Path(run).name + ("" if is_weights_file(run) else stored.origin.removeprefix(run))  # " at N images"
    recipe = open_trained(stored, run).recipe
    sources = _open_needed(run, stored, recipe, options)
    recipe.to(device=world.device, dtype=precision.weights)
    drawer = Drawer(recipe.draws, config.run.seed, world.device, precision.weights)
    if has_strips(recipe):
        if options.flag:
            raise UserError(f"{options.flag}: only for generators, but {type(recipe).__name__} transforms images")
        source = sources.get(recipe.evaluation.split, sources["train"])
        samples = strip_samples(source, drawer, precision, stored.spec)
        channels = ShownChannels.parse(config.run.preview_channels, sources["train"].spec.channels)
        return make_strips(recipe, samples, precision, channels), caption
    check_use(stored, "sample", run)
    count = options.rows * (2 if options.interpolate else 1 if options.nearest else options.columns)
    draws = fixed_draws(recipe, drawer, stored.spec, count)
    draws = truncate_draws(recipe, draws, options.truncation, "--truncation ")
    if options.interpolate:
        draws = interpolate_draws(recipe, draws, options.columns)
    if options.label:
        per_row = 1 if options.nearest else options.columns
        draws = choose_class(recipe, draws, stored.spec, options.label, per_row, "--class ")
        caption += _describe_classes(recipe, stored.spec, options)
    images, columns = make_images(recipe, draws, precision), options.columns
    if options.nearest:
        columns = min(columns, 1 + len(sources["train"]))  # no training image twice
        images = with_nearest(images, sources["train"], columns - 1, config.run, world.device)
    shown = ShownChannels.parse(config.run.preview_channels, images.shape[-1]).of(images)
    return to_image(grid(shown, columns)), caption


def _describe_classes(recipe: Recipe, spec: DataSpec, options: GridOptions) -> str:
    """Return which classes a grid shows, for its caption."""
    if not is_every_class(options.label, spec.classes):
        return f", class {spec.classes[class_index(recipe, spec, options.label, '--class ')]}"
    num_classes = len(trained_classes(spec))
    return f" (the first {options.rows} of {num_classes:,} classes)" if options.rows < num_classes else ""


def _open_needed(run: str, stored: StoredModel, recipe: Recipe, options: GridOptions) -> dict[str, Source]:
    """Open the run's data if it appears in the images: as the inputs of strips, or as the nearest training images."""
    if not has_strips(recipe) and not options.nearest:
        if options.data_root:
            raise UserError(f"--data-root {options.data_root}: only --nearest and strips show data; leave it out")
        return {}
    if is_weights_file(run):
        if has_strips(recipe):
            raise UserError(f"{run}: a weights file has no input images; use the run folder, or `paceline apply`")
        raise UserError(f"--nearest: {run} is a weights file, without training images; use the run folder")
    sources = open_sources(stored.config)
    check_sources(recipe, stored.spec, sources, stored.config)
    return sources


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


IMAGES_AT_ONCE = 256
# Channels and pixel types of PNG files that can be read without loss; 16-bit colours are read as 8-bit.
PNG_PIXELS = ((1, "uint8"), (3, "uint8"), (1, "uint16"))


class _Generated(NamedTuple):
    path: Path
    pixels: NDArray[Any]


def write_samples(
    model: Model, folder: Path, count: int, encoding: Encoding, label: str | None = None, truncation: float = 1
) -> Iterator[Path]:
    """Write images 0 … count - 1 and yield the path of each, in order; for `label` and `truncation`, see Model."""
    if (model.spec.channels, model.spec.dtype) not in PNG_PIXELS:
        encoding = replace(encoding, format="tiff")
    digits, suffix = max(5, len(str(count - 1))), encoding.suffix(Path())

    def generate() -> Iterator[_Generated]:
        for first in range(0, count, IMAGES_AT_ONCE):
            images = model.sample(min(IMAGES_AT_ONCE, count - first), None, first, label, truncation)
            for number, pixels in enumerate(images.permute(0, 2, 3, 1).numpy(), start=first):
                yield _Generated(folder / f"{number:0{digits}}{suffix}", pixels)

    def write(image: _Generated) -> Path:
        write_image(image.path, image.pixels, encoding)
        return image.path

    return ordered_map(write, generate(), num_cores())
