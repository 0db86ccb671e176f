"""Images from a run's checkpoint: a grid of generated images, or strips from a recipe that transforms images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from paceline.config.resolve import Config
from paceline.contracts.recipe import DataSpec, Recipe
from paceline.core.errors import UserError
from paceline.data.draws import Drawer
from paceline.data.open_sources import open_sources
from paceline.data.source import Source
from paceline.images.grids import grid, to_image
from paceline.images.shown_channels import ShownChannels
from paceline.inference.chosen_draws import choose_class, class_index, is_every_class, trained_classes, truncate_draws
from paceline.inference.image_model import open_recipe
from paceline.inference.interpolation import interpolate_draws
from paceline.inference.nearest import with_nearest
from paceline.inference.trained import StoredModel, read_stored
from paceline.inference.uses import check_use
from paceline.parallel.precision import choose_precision
from paceline.parallel.world import join
from paceline.runs.recipe import check_sources
from paceline.runs.weights_file import is_weights_file
from paceline.training.previews import fixed_draws, has_strips, make_images, make_strips, strip_samples


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
    recipe = open_recipe(stored, run)
    sources = _open_needed(run, stored, recipe, options)
    recipe.to(device=world.device, dtype=precision.weights)
    drawer = Drawer(recipe.draws, config.run.seed, world.device, precision.weights)
    if has_strips(recipe):
        if options.flag:
            raise UserError(f"{options.flag}: only for generators, but {type(recipe).__name__} transforms images")
        source = sources.get(recipe.evaluated_on, sources["train"])
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
