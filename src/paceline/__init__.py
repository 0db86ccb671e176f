"""Paceline trains image models on one device or many, from one recipe.

    import paceline

    result = paceline.train("classification", data="digits", preset="quick", out="runs/first")
    model = paceline.load(result.folder)
    probabilities = model.predict(images)

Importing this package does not import torch; the first use of a name does.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os

    import torch

    from paceline.commands.train import TrainResult
    from paceline.commands.verify import Difference
    from paceline.config.settings import RunSettings, setting
    from paceline.contracts.recipe import Batch, Best, DataSpec, Draw, Loss, Phase, Recipe
    from paceline.core.errors import UserError
    from paceline.core.types import SettingValue
    from paceline.data.loader import Loader
    from paceline.data.source import ArraySource, Source
    from paceline.evaluation.contract import Case, Evaluator
    from paceline.inference.model import Model
    from paceline.parallel.strategy import Strategy
    from paceline.runs.logger import Logger

__version__ = "0.2.0"
__all__ = [
    "ArraySource",
    "Batch",
    "Best",
    "Case",
    "DataSpec",
    "Draw",
    "Evaluator",
    "Loader",
    "Logger",
    "Loss",
    "Model",
    "Phase",
    "Recipe",
    "RunSettings",
    "Source",
    "Strategy",
    "TrainResult",
    "UserError",
    "load",
    "setting",
    "train",
    "verify",
]
_MODULES = {  # imported when a name is first used
    "ArraySource": "paceline.data.source",
    "Batch": "paceline.contracts.recipe",
    "Best": "paceline.contracts.recipe",
    "Case": "paceline.evaluation.contract",
    "DataSpec": "paceline.contracts.recipe",
    "Draw": "paceline.contracts.recipe",
    "Evaluator": "paceline.evaluation.contract",
    "Loader": "paceline.data.loader",
    "Logger": "paceline.runs.logger",
    "Loss": "paceline.contracts.recipe",
    "Model": "paceline.inference.model",
    "Phase": "paceline.contracts.recipe",
    "Recipe": "paceline.contracts.recipe",
    "RunSettings": "paceline.config.settings",
    "Source": "paceline.data.source",
    "Strategy": "paceline.parallel.strategy",
    "TrainResult": "paceline.commands.train",
    "UserError": "paceline.core.errors",
    "setting": "paceline.config.settings",
}


def train(recipe: str, **settings: SettingValue | Mapping[str, SettingValue]) -> TrainResult:
    """Train a recipe and return where the run is and how it ended; raise UserError like the command reports it.

    Settings have the names of the command line: `--batch-size 64` is `batch_size=64`. Those of one network are a dict:
    `train("dcgan", discriminator={"lr": 4e-4})`. The same call again resumes the run.
    """
    from paceline.commands.configure import configure
    from paceline.commands.train import train_and_report

    return train_and_report(configure(recipe, settings))


def load(
    run: str | os.PathLike[str], checkpoint: str | int = "best", device: str | torch.device | None = None
) -> Model:
    """Return the trained model of a run's folder or of a weights file, without its data.

    `checkpoint` is "best", "last" or a number of images seen. The device is a GPU where there is one.
    """
    from paceline.inference.model import load as load_model

    return load_model(str(run), str(checkpoint), device)


def verify(
    recipe: str,
    strategies: Sequence[str] = ("single", "ddp"),
    steps: int = 20,
    tolerance: float = 1e-9,
    **settings: SettingValue | Mapping[str, SettingValue],
) -> list[Difference]:
    """Train a recipe for some float64 steps under each strategy, and return how far each is from the first.

    A strategy gives the same weights where every difference has `value <= tolerance`.
    """
    from paceline.commands.configure import configure
    from paceline.commands.verify import differences

    return differences(configure(recipe, {"devices": 2, **settings}, small=True), list(strategies), steps, tolerance)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
