"""Paceline trains image models on one device or many, from one recipe.

import paceline
paceline.train("classification", data="digits", preset="quick", out="runs/first")
model = paceline.load("runs/first")
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.inference.model import Model

__version__ = "0.1.0"


def train(recipe: str, **settings: Any) -> Any:
    """Trains a recipe with any settings by name; networks' own as dicts: `discriminator={"lr": 4e-4}`."""
    from paceline.commands.configure import configure
    from paceline.commands.train import train_and_report

    return train_and_report(configure(recipe, settings))


def load(run: str | os.PathLike[str], checkpoint: str | int = "best", device: Any = None) -> Model:
    """What a run learned, or a weights file holds: `predict`, `sample` or `apply` it; `networks` has its networks."""
    from paceline.inference.model import load as job

    return job(str(run), str(checkpoint), device)
