"""What a report needs to know of one run, read from its folder and from nowhere else."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config_file import MADE_WITH, flatten
from paceline.engine.finished_run import config_of
from paceline.engine.run_folder import RunFolder
from paceline.monitor.metrics import read_metrics
from paceline.recipe import Recipe
from paceline.registry import load_class

Line = dict[str, Any]
MAX_POINTS = 400  # of a curve; more cannot be told apart on a page
NOT_LOSSES = {"time", "lr", "spread", "gpu", "train", "validation", "test"}  # groups of metrics of other kinds
LOADING, STEPPING = ("time/data_seconds",), ("time/step_seconds", "time/log_seconds")
KEEPING = ("time/save_seconds", "time/sample_seconds")
BOOKKEEPING = {"count", "of_images"}  # said along with metrics, and no quality


@dataclass(frozen=True)
class Run:
    """One run in numbers."""

    folder: str
    recipe: str
    data: str
    fingerprint: str
    strategy: str
    devices: int
    shares_a_gpu: bool
    batch: int
    seed: int
    precision: str
    settings: dict[str, Any] = field(repr=False)
    made_with: dict[str, str] = field(repr=False)
    images: int
    seconds: float
    finished: bool
    best: tuple[str, str]  # the metric that chooses, and its good end
    quality: dict[str, float]
    chosen_by: dict[str, Any]  # the name, value and images of the checkpoint that was judged
    speed: dict[str, float]
    seconds_per_epoch: dict[str, float]
    gpu: dict[str, float]
    losses: dict[str, list[list[float]]] = field(repr=False)  # by name: [images, seconds, value]
    course: list[list[float]] = field(repr=False)  # of the metric that chooses: [images, seconds, value]
    protocols: dict[str, dict[str, Any]] = field(repr=False)
    samples: str = ""  # the last grid of pictures


def read_run(path: str) -> Run:
    """A run's numbers; refuses a folder that is not one."""
    config = config_of(path, own_source=False)
    folder = RunFolder(Path(path))
    kept = tomllib.loads(folder.config_file.read_text())
    made_with = kept.pop(MADE_WITH, {})
    lines, _ = read_metrics(folder.path)
    recipe: type[Recipe] = load_class("recipe", config.recipe_name, Recipe)
    quality, chosen_by = _quality(lines, recipe)
    run = config.run
    strategy = run.strategy if run.strategy != "auto" else ("ddp" if run.devices > 1 else "single")
    gpus = run.gpus.split(",") if run.gpus else []
    pictures = sorted((folder.path / "samples").glob("*.png"))
    images = max((line["images"] for line in lines), default=0)
    return Run(
        folder=str(path),
        recipe=config.recipe_name,
        data=run.data,
        fingerprint=made_with.pop("data", ""),
        strategy=strategy,
        devices=run.devices,
        shares_a_gpu=len(set(gpus)) < len(gpus),
        batch=int(run.batch_size) if run.batch_size.isdigit() else 0,
        seed=run.seed,
        precision=run.precision,
        settings=flatten({name: value for name, value in kept.items() if name != "recipe"}),
        made_with=made_with,
        images=images,
        seconds=max((line["seconds"] or 0.0 for line in lines), default=0.0),
        finished=_has_ended(folder, lines, config.run.images, config.run.epochs),
        best=recipe.best,
        quality=quality,
        chosen_by=chosen_by,
        speed=_speed(lines),
        seconds_per_epoch=_seconds_per_epoch(lines),
        gpu=_gpu(lines),
        losses=_losses(lines),
        course=_course(lines, recipe.best[0]),
        protocols={name: folder.protocol_of(name) for name in quality if folder.protocol_of(name)},
        samples=str(pictures[-1]) if pictures else "",
    )


def _has_ended(folder: RunFolder, lines: list[Line], images: int, epochs: float) -> bool:
    """Whether the last checkpoint is at the length of training that the settings ask for."""
    epoch = next((line["images"] / line["epoch"] for line in reversed(lines) if line.get("epoch")), 0.0)
    wanted = images or epochs * epoch
    return bool(lines) and bool(wanted) and max(folder.checkpoints.all(), default=0) >= round(wanted)


def _named(line: Line, wanted: str) -> str:
    """A metric's name in a line, with what it has in [brackets]."""
    return next((name for name in line if name.partition("[")[0] == wanted), "")


def _quality(lines: list[Line], recipe: type[Recipe]) -> tuple[dict[str, float], dict[str, Any]]:
    """The metrics of the checkpoint that was chosen, and what it was chosen by."""
    wanted, end = recipe.best
    judged = [(line[_named(line, wanted)], line) for line in lines if wanted and _named(line, wanted)]
    judged = [(value, line) for value, line in judged if value is not None]
    choose = max if end == "max" else min
    value, line = choose(judged, key=lambda pair: pair[0], default=(None, None))
    chosen = {"name": _named(line, wanted), "value": value, "images": line["images"]} if line else {}
    tested = [line for line in lines if "test/of_images" in line]
    source = tested[-1] if tested else line or {}
    split = "test" if tested else recipe.judged_on
    quality = {name: value for name, value in source.items() if name.startswith(f"{split}/")}
    return {name: value for name, value in quality.items() if name.split("/")[1] not in BOOKKEEPING}, chosen


def _windows(lines: list[Line]) -> list[tuple[int, Line]]:
    """The stretches between two logs, with their images, less the first, which has the warm-up in it."""
    logged = [line for line in lines if STEPPING[0] in line]
    before = [0, *(line["images"] for line in logged)]
    windows = [(line["images"] - start, line) for start, line in zip(before, logged, strict=False)]
    return windows[1:] if len(windows) > 1 else windows


def _sum(lines: Iterable[Line], names: Iterable[str]) -> float:
    return sum(line.get(name) or 0.0 for line in lines for name in names)


def _speed(lines: list[Line]) -> dict[str, float]:
    """Images per second of training alone: without evaluation, samples and saving."""
    windows = _windows(lines)
    images, taken = sum(count for count, _ in windows), [line for _, line in windows]
    stepping, loading = _sum(taken, STEPPING), _sum(taken, LOADING)
    if not images or not stepping:
        return {}
    return {
        "images_per_second": images / (stepping + loading),
        "images_per_second_without_loading": images / stepping,
        "windows": len(windows),
    }


def _seconds_per_epoch(lines: list[Line]) -> dict[str, float]:
    """Where the time of one pass over the data goes, by the host's clock."""
    windows = _windows(lines)
    images, taken = sum(count for count, _ in windows), [line for _, line in windows]
    last = next((line for line in reversed(lines) if line.get("epoch")), None)
    if not images or last is None:
        return {}
    per_epoch = last["images"] / last["epoch"] / images
    return {
        "data": _sum(taken, LOADING) * per_epoch,
        "step": _sum(taken, STEPPING) * per_epoch,
        "evaluation": _sum(lines, ["time/evaluation_seconds"]) / last["epoch"],
        "saving": _sum(lines, KEEPING) / last["epoch"],
    }


def _gpu(lines: list[Line]) -> dict[str, float]:
    """What NVML said of the first process's GPU; nothing where it said nothing."""
    read = [line for line in lines if "gpu/utilisation" in line]
    found: dict[str, float] = {}
    for name, key in (("utilisation", "gpu/utilisation"), ("power_watts", "gpu/power_watts")):
        values = [line[key] for line in read if line.get(key) is not None]
        if values:
            found[name] = sum(values) / len(values)
    peaks = [line["gpu/peak_memory_gib"] for line in lines if line.get("gpu/peak_memory_gib") is not None]
    if peaks:
        found["peak_memory_gib"] = max(peaks)
    energy = [(line["images"], line["gpu/energy_joules"]) for line in read if line.get("gpu/energy_joules")]
    if len(energy) > 1 and energy[-1][0] > energy[0][0] and energy[-1][1] > energy[0][1]:
        found["joules_per_1000_images"] = 1000 * (energy[-1][1] - energy[0][1]) / (energy[-1][0] - energy[0][0])
    return found


def _losses(lines: list[Line]) -> dict[str, list[list[float]]]:
    names = dict.fromkeys(name for line in lines for name in line if "/" in name and "/spread" not in name)
    wanted = [name for name in names if name.split("/")[0] not in NOT_LOSSES and not name.endswith("_score")]
    return {
        name: _thin([[x["images"], x["seconds"], x[name]] for x in lines if x.get(name) is not None]) for name in wanted
    }


def _course(lines: list[Line], wanted: str) -> list[list[float]]:
    found = [[x["images"], x["seconds"], x[_named(x, wanted)]] for x in lines if wanted and _named(x, wanted)]
    return _thin([point for point in found if point[2] is not None])


def _thin(points: list[list[float]]) -> list[list[float]]:
    """Some of many points, the last among them."""
    step = -(-len(points) // MAX_POINTS) or 1
    return points[::-1][::step][::-1]
