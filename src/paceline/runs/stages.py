"""Recipe stages: one setting that expands to several runs, each starting from the weights of the previous one."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch

from paceline.config.resolve import Config
from paceline.core.files import user_path
from paceline.core.printable import print_line
from paceline.parallel.world import World
from paceline.runs.finished_run import readable_config_of, stages_in
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import read_metrics


def stages_of(config: Config, world: World | None = None) -> list[Config]:
    """Return the configs of the runs that remain: the config itself or, for a recipe with stages, one per stage.

    A stage is skipped once the next stage has started from its best weights. If each host has its own disk, a stage
    that has started on one host counts as started on all. The other hosts may have been replaced, or may have failed
    before they wrote a file.
    """
    names = config.recipe_class.stages.get(getattr(config.recipe, "stage", ""), ())
    if not names:
        return [config]
    folders = [Path(config.run.out) / name for name in names]
    starts = [config.run.init_from, *map(str, folders)]
    stages = [
        dataclasses.replace(
            config.with_run(
                out=str(folder),
                init_from=start,
                mirror=_subfolder(config.run.mirror, name),
                resume_from=_subfolder(config.run.resume_from, name),
            ),
            recipe=dataclasses.replace(config.recipe, stage=name),
        )
        for name, folder, start in zip(names, folders, starts, strict=False)
    ]
    started = max(
        (number for number, folder in enumerate(folders) if RunFolder(folder).config_file.exists()), default=0
    )
    if world:
        started = int(world.gather(torch.tensor([started], device=world.device)).max())
    return stages[started:]


def last_finished(path: str, *, trust: bool = False) -> str:
    """Return the last finished stage in a folder of stages; return any other path unchanged."""
    place = user_path(path)
    if RunFolder(place).config_file.exists():
        return path
    runs = stages_in(place)
    if not runs:
        return path
    stages = readable_config_of(str(runs[0]), trust=trust).recipe_class.stages
    started = [place / name for names in stages.values() for name in names if place / name in runs]
    for number, folder in reversed(list(enumerate(started))):
        if _has_ever_finished(folder):
            for later in started[number + 1 :]:
                print_line(f"{later} has not finished: using {folder}", sys.stderr)
            return str(folder)
    return path


def _has_ever_finished(run: Path) -> bool:
    """Return whether a run has ever finished; the metrics of a resumed run still contain its final evaluation."""
    return RunFolder(run).has_finished or any("test/checkpoint_images" in line for line in read_metrics(run))


def _subfolder(url: str, name: str) -> str:
    return f"{url.rstrip('/')}/{name}" if url else ""
