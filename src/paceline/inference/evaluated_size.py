"""The size of the pictures that a classifier is judged on: whole ones, though it may have learned from windows."""

from __future__ import annotations

from paceline.inference.trained import Trained


def evaluated_size(trained: Trained) -> tuple[int, int] | None:
    """Height and width, or None where pictures of any size may be judged."""
    run = trained.config.run
    if not run.crop:
        return trained.spec.height, trained.spec.width
    # Of the pictures that windows were cut from, only the size that was asked for is known.
    return (run.size, run.size) if run.size else None
