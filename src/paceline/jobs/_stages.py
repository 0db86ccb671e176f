"""A recipe's stages: one setting that means several runs in a row, each starting from the one before."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from paceline.config import Config
from paceline.engine.run_folder import RunFolder
from paceline.recipe import Recipe
from paceline.registry import load_class


def stages_of(config: Config) -> list[Config]:
    """The runs that a config means: itself, or one in RUN/STAGE for each stage, those that are over left out.

    A stage is over when the next one has begun: that one started from its best weights.
    """
    recipe_class = load_class("recipe", config.recipe_name, Recipe)
    names = recipe_class.stages.get(getattr(config.recipe, "stage", ""), ())
    if not names:
        return [config]
    folders = [Path(config.run.out) / name for name in names]
    starts = [config.run.init_from, *map(str, folders)]
    stages = [
        dataclasses.replace(
            config.with_run(
                out=str(folder),
                init_from=start,
                mirror=_beneath(config.run.mirror, name),
                resume_from=_beneath(config.run.resume_from, name),
            ),
            recipe=dataclasses.replace(config.recipe, stage=name),
        )
        for name, folder, start in zip(names, folders, starts, strict=False)
    ]
    begun = [number for number, folder in enumerate(folders) if RunFolder(folder).config_file.exists()]
    return stages[max(begun, default=0) :]


def _beneath(url: str, name: str) -> str:
    return f"{url.rstrip('/')}/{name}" if url else ""
