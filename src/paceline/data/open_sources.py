"""Opens the sources of a run, one for each split."""

from __future__ import annotations

import math

import numpy as np

from paceline.config.resolve import Config
from paceline.core.errors import UserError
from paceline.core.registry import load_class
from paceline.data.groups import held_out
from paceline.data.source import Source
from paceline.data.subset import Subset, split_off


def open_sources(config: Config, split: str = "") -> dict[str, Source]:
    """Return the run's sources by split: train, test if the source has one, and validation if samples are held out.

    If `split` is given and is stored separately from the training samples, only that split is opened.
    """
    source_class = load_class("source", config.run.data, Source)
    splits = source_class.splits_of(config.run)
    if split != "train" and split in splits:
        return {split: source_class(split, config.run)}
    sources = {split: source_class(split, config.run) for split in splits}
    if config.run.validation:
        whole = sources["train"]
        sources["train"], sources["validation"] = _split_off(whole, config.run.validation, config.run.split_seed)
        sources["train"].notes, sources["train"].not_used = whole.notes, whole.not_used
        if not len(sources["train"]) or not len(sources["validation"]):
            raise _no_validation(config.run.validation, len(whole))
    return sources


def _split_off(whole: Source, fraction: float, seed: int) -> tuple[Source, Source]:
    if not whole.groups:
        return split_off(whole, fraction, seed)
    validated = held_out(whole.groups, fraction, seed)
    return Subset(whole, np.flatnonzero(~validated)), Subset(whole, np.flatnonzero(validated))


def _no_validation(share: float, total: int) -> UserError:
    """Return the error for a validation fraction that leaves a split empty. The message suggests a better fraction."""
    one = (
        f"--set validation={math.ceil(1000 / total) / 1000:g} to hold out at least one sample, or " if total > 1 else ""
    )
    return UserError(
        f"validation={share:g}: leaves a split empty (samples available: {total}); "
        f"use {one}--set validation=0 to hold out no samples"
    )
