"""`paceline sample`: grids, strips, interpolations and animations of what a recipe makes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from paceline.commands.configure import checked
from paceline.contracts.recipe import Batch, Recipe
from paceline.core.errors import UserError
from paceline.core.types import SettingValue
from paceline.data.draws import Drawer
from paceline.data.open_sources import open_sources
from paceline.images.grids import MOVING, captioned, grid, save_animation, side_by_side, to_image
from paceline.parallel.precision import choose_precision
from paceline.parallel.world import join
from paceline.runs.checkpoint import choose_checkpoint
from paceline.runs.finished_run import config_of
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import SAMPLES
from paceline.runs.recipe import make_recipe
from paceline.runs.stages import last_finished
from paceline.runs.weights import load_weights
from paceline.training.sampling import fixed_draws, make_pictures
from paceline.training.strips import has_strips, make_strips, strip_samples

USUAL_GRID = "8x8"
LARGEST_GRID = 4096  # pictures


@dataclass(frozen=True)
class Options:
    """What a person wants to see."""

    grid: str = ""  # rows and columns
    interpolate: bool = False
    animate: bool = False
    checkpoint: str = "best"
    accelerator: str = ""


def sample(runs: list[str], out: str, options: Options) -> int:
    """Writes a picture, or an animation, of one run or of several side by side."""
    if options.animate and options.interpolate:
        raise UserError("--animate and --interpolate do not go together")
    if options.animate and options.grid:
        raise UserError(f"--grid {options.grid}: --animate shows the pictures that training kept, as they are")
    kind = "animation" if options.animate else "interpolation" if options.interpolate else "grid"
    runs = [last_finished(run) for run in runs]
    files = _files(Path(runs[0]), out, kind)
    if options.animate:
        frames = _frames(runs)
        for file in files:
            save_animation(frames, file)
        print(f"{len(frames)} frames → {', '.join(map(str, files))}")
        return 0
    shown = [_show(run, options) for run in runs]
    whole = shown[0][0] if len(shown) == 1 else side_by_side([captioned(*one) for one in shown])
    whole.save(files[0])
    print(f"{'; '.join(text for _, text in shown)} → {files[0]}")
    return 0


def _files(run: Path, out: str, kind: str) -> list[Path]:
    """Where to write."""
    allowed = MOVING if kind == "animation" else (".png",)
    if not run.is_dir():
        raise UserError(f"{run}: not a run's folder")
    if not out:
        return [run / f"{kind}{suffix}" for suffix in allowed]
    file = Path(out)
    if file.suffix.lower() not in allowed:
        raise UserError(f"--out {out}: expected a name that ends in {' or '.join(allowed)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}") from None
    return [file]


def _show(run: str, options: Options) -> tuple[Image.Image, str]:
    """A run's grid, and which run and checkpoint it is of."""
    rows, columns = _parse_grid(options.grid or USUAL_GRID)
    flags: dict[str, SettingValue] = {"gpus": "", "devices": 1}
    flags |= {"accelerator": options.accelerator} if options.accelerator else {}
    config = checked(config_of(run, [("flag", flags)]))
    world = join(config.run, distributed=False)
    precision = choose_precision(config.run.precision, world.device)
    precision.apply(deterministic=config.run.deterministic)
    sources = open_sources(config)
    recipe = make_recipe(config, sources)
    snapshot = choose_checkpoint(RunFolder(Path(run)).checkpoints, options.checkpoint)
    load_weights(recipe, snapshot.weights, ema=True)
    recipe.to(device=world.device, dtype=precision.weights)
    text = f"{Path(run).name} at {snapshot.images:,} images"
    if has_strips(recipe):
        meant_for_noise = f"--grid {options.grid}" if options.grid else "--interpolate" if options.interpolate else ""
        if meant_for_noise:
            raise UserError(f"{meant_for_noise}: {type(recipe).__name__} makes its pictures of others, not of noise")
        samples = strip_samples(sources.get(recipe.evaluated_on, sources["train"]), world.device, precision)
        return make_strips(recipe, samples, precision), text
    drawer = Drawer(recipe.draws, config.run.seed, world.device, precision.weights)
    draws = fixed_draws(recipe, drawer, 2 * rows if options.interpolate else rows * columns)
    if options.interpolate:
        draws = _between(recipe, draws, columns)
    pictures = make_pictures(recipe, draws, precision)
    return to_image(grid(pictures, columns)), text


def _parse_grid(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)\s*[x×]\s*(\d+)", text.strip().lower())
    rows, columns = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 0 < rows * columns <= LARGEST_GRID:
        raise UserError(f"--grid {text}: expected rows and columns like 8x8, {LARGEST_GRID:,} pictures at most")
    return rows, columns


def _between(recipe: Recipe, ends: Batch, steps: int) -> Batch:
    """For each pair of rows, draws that go from one to the other: normal ones on an arc, so that they stay likely."""
    shares = torch.linspace(0, 1, steps)
    between = {}
    for name, rows in ends.items():
        go = slerp if recipe.draws[name].kind == "normal" else torch.lerp
        pairs = rows.reshape(len(rows), -1).double().unflatten(0, (-1, 2))
        moved = torch.stack([torch.stack([go(a, b, share.to(a)) for share in shares]) for a, b in pairs])
        between[name] = moved.to(rows.dtype).reshape(-1, *rows.shape[1:])
    return between


def slerp(start: Tensor, end: Tensor, share: Tensor) -> Tensor:
    """The point between two vectors on the arc from one to the other."""
    angle = torch.arccos((start @ end / (start.norm() * end.norm())).clamp(-1, 1))
    if angle.sin().abs() < 1e-6:  # in line: the arc is a straight one, or any
        return torch.lerp(start, end, share)
    return (((1 - share) * angle).sin() * start + (share * angle).sin() * end) / angle.sin()


def _frames(runs: list[str]) -> list[Image.Image]:
    """The grids that were kept while training, by images seen; with several runs, each shows its latest."""
    kept = {run: _kept_grids(run) for run in runs}
    moments = sorted({images for grids in kept.values() for images in grids})
    frames = []
    for moment in moments:
        shown = []
        for run, grids in kept.items():
            latest = max((images for images in grids if images <= moment), default=min(grids))
            with Image.open(grids[latest]) as picture:
                shown.append(captioned(picture.convert("RGB"), f"{Path(run).name}: {latest:,} images"))
        frames.append(side_by_side(shown))
    return frames


def _kept_grids(run: str) -> dict[int, Path]:
    config_of(run, own_source=False)  # refuses what is not a run
    found = {}
    for path in (Path(run) / SAMPLES).glob("samples-*.png"):
        images = path.stem.rpartition("-")[2]
        if images.isdigit():
            found[int(images)] = path
    if not found:
        raise UserError(f"{run}: keeps no grids in {SAMPLES}/ to animate; a run that makes pictures writes them")
    return found
