"""Paceline trains image models on one device or many, from one recipe.

import paceline
paceline.train("classification", data="digits", preset="quick")
"""

from typing import Any

__version__ = "0.1.0"


def train(recipe: str, **settings: Any) -> Any:
    """Trains a recipe with any settings by name; networks' own as dicts: `discriminator={"lr": 4e-4}`."""
    from paceline.jobs.configure import configure
    from paceline.jobs.train import train_and_report

    return train_and_report(configure(recipe, settings))
