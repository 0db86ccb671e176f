"""Recipe stages: one setting that expands to several runs, each starting from the weights of the previous one."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch

from paceline.config.resolve import Config
from paceline.core.printable import print_line
from paceline.parallel.world import World
from paceline.runs.finished_run import readable_config_of, stages_in
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import read_metrics


def stages_of(config: Config, world: World | None = None) -> list[Config]:
    """Return the runs that a config expands to: itself, or RUN/STAGE for each stage that is not over.

    A stage is over once the next one has started from its best weights. If each host has its own disk, a stage counts
    as started on all hosts once it has started on one. The other hosts were replaced, or failed before writing.
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
    place = Path(path).expanduser()
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
                print_line(f"{later} is not finished: using {folder}", sys.stderr)
            return str(folder)
    return path


def _has_ever_finished(run: Path) -> bool:
    """Return whether a run has ever finished. Its final evaluation stays in the metrics even if it is resumed."""
    return RunFolder(run).has_finished or any("test/checkpoint_images" in line for line in read_metrics(run))


def _subfolder(url: str, name: str) -> str:
    return f"{url.rstrip('/')}/{name}" if url else ""
