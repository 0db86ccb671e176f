"""What a report needs to know of one run, read from its folder and from nowhere else."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.config.resolve import flatten
from paceline.contracts.recipe import Recipe
from paceline.report.stretches import Line, seconds_per_epoch, speed_of, stretches_of
from paceline.runs.finished_run import config_of
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import METRICS, parse_line
from paceline.runs.record import RunRecord
from paceline.runs.segments import HARDWARE, changes

MAX_POINTS = 400  # of a curve; more cannot be told apart on a page
NOT_LOSSES = {"time", "lr", "spread", "gpu", "train", "validation", "test"}  # groups of metrics of other kinds
TOO_LARGE = 1e300  # JSON can spell numbers that no float holds
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
    hardware: dict[str, str]  # and torch: what else than its settings makes a run's speed
    images: int
    seconds: float
    finished: bool
    best: tuple[str, str]  # the metric that chooses, and its good end
    quality: dict[str, float]
    chosen_by: dict[str, Any]  # the name, value and images of the checkpoint that was judged, and by how many samples
    speed: dict[str, Any]
    seconds_per_epoch: dict[str, float]
    gpu: dict[str, float]
    losses: dict[str, list[list[float]]] = field(repr=False)  # by name: [images, seconds, value]
    course: list[list[float]] = field(repr=False)  # of the metric that chooses: [images, seconds, value]
    protocols: dict[str, dict[str, Any]] = field(repr=False)
    samples: str = ""  # the last grid of pictures
    broken_lines: int = 0  # of metrics.jsonl, which are left out
    went_on: list[dict[str, Any]] = field(default_factory=list)  # in another way: at which images, and what changed


def read_run(path: str) -> Run:
    """A run's numbers; refuses a folder that is not one."""
    config = config_of(path, own_source=False)
    folder = RunFolder(Path(path))
    record = folder.read_record(path)
    assert record is not None
    segment = record.segment
    went_on = _went_on(record)
    since = went_on[-1]["images"] if went_on else 0
    made_with = dict(record.made_with.versions_and_hardware)
    lines, after_gaps, broken = _read_lines(folder.path / METRICS)
    stretches = stretches_of(lines, after_gaps, since)
    recipe = config.recipe_class
    quality, chosen_by = _quality(lines, recipe)
    run = config.run
    gpus = run.gpus.split(",") if run.gpus else []
    pictures = sorted((folder.path / "samples").glob("*.png"))
    images = max((line["images"] for line in lines), default=0)
    return Run(
        folder=str(path),
        recipe=config.recipe_name,
        data=run.data,
        fingerprint=record.made_with.data,
        strategy=segment.strategy,
        devices=segment.devices,
        shares_a_gpu=len(set(gpus)) < len(gpus),
        batch=int(run.batch_size) if run.batch_size.isdigit() else 0,
        seed=run.seed,
        precision=run.precision,
        settings=flatten(record.settings),
        made_with=made_with,
        hardware=_hardware(segment.accelerator, made_with),
        images=images,
        seconds=max((line["seconds"] for line in lines), default=0.0),
        finished=_has_ended(folder, lines, config.run.images, config.run.epochs),
        best=recipe.best,
        quality=quality,
        chosen_by=chosen_by,
        speed=speed_of(stretches),
        seconds_per_epoch=seconds_per_epoch(stretches, lines, since),
        gpu=_gpu([line for line in lines if line["images"] > since], len(set(gpus)) or segment.devices),
        losses=_losses(lines),
        course=_course(lines, recipe.best[0]),
        protocols={name: dict(folder.protocol_of(name)) for name in quality if folder.protocol_of(name)},
        samples=str(pictures[-1]) if pictures else "",
        broken_lines=broken,
        went_on=went_on,
    )


def _read_lines(metrics: Path) -> tuple[list[Line], set[int], int]:
    """The whole lines, the places among them that follow a broken one, and how many are broken."""
    lines: list[Line] = []
    after_gaps: set[int] = set()
    broken = 0
    for raw in metrics.read_bytes().splitlines() if metrics.is_file() else []:
        line = parse_line(raw)
        if line is not None and _is_whole(line):
            lines.append(line)
        else:
            broken += 1
            after_gaps.add(len(lines))
    return lines, after_gaps, broken


def _is_whole(line: Line) -> bool:
    """Whether every value is a number, or null where one was not finite; a line always has its seconds."""
    numbers = [value for value in line.values() if value is not None]
    return line.get("seconds") is not None and all(type(n) in (int, float) and abs(n) < TOO_LARGE for n in numbers)


def _went_on(record: RunRecord) -> list[dict[str, Any]]:
    """Where the run went on in another way than before; its speed is of what came last."""
    return [
        {"images": one.until_images, "changed": ", ".join(changes(one, after))}
        for one, after in pairwise(record.segments)
    ]


def _hardware(accelerator: str, made_with: dict[str, str]) -> dict[str, str]:
    """By name; "none" is what a machine has not."""
    return {"accelerator": accelerator} | {name: made_with.get(name, "none") for name in HARDWARE}


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
    chosen = {}
    if line:
        split = wanted.partition("/")[0]
        chosen = {"name": _named(line, wanted), "value": value, "images": line["images"]}
        chosen["judged_on"] = line.get(f"{split}/count")
    tested = [line for line in lines if "test/of_images" in line]
    source = tested[-1] if tested else line or {}
    split = "test" if tested else recipe.evaluated_on
    quality = {name: value for name, value in source.items() if name.startswith(f"{split}/")}
    return {name: value for name, value in quality.items() if name.split("/")[1] not in BOOKKEEPING}, chosen


def _gpu(lines: list[Line], num_gpus: int) -> dict[str, float]:
    """What NVML said of the first process's GPU, its energy taken for each; nothing where it said nothing."""
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
        images, joules = energy[-1][0] - energy[0][0], num_gpus * (energy[-1][1] - energy[0][1])
        found["joules_per_1000_images"] = 1000 * joules / images
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
