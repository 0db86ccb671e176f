"""The sources of a run, by split."""

from __future__ import annotations

import math

from paceline.config.resolve import Config
from paceline.core.errors import UserError
from paceline.core.registry import load_class
from paceline.data.source import Source, split_off


def open_sources(config: Config, split: str = "") -> dict[str, Source]:
    """Return the run's sources: train, validation where some is held out, test where the source has one.

    Where `split` does not come from the training samples, only that one is opened.
    """
    source_class = load_class("source", config.run.data, Source)
    splits = source_class.splits_of(config.run)
    if split != "train" and split in splits:
        return {split: source_class(split, config.run)}
    sources = {split: source_class(split, config.run) for split in splits}
    if config.run.validation:
        whole = sources["train"]
        sources["train"], sources["validation"] = split_off(whole, config.run.validation, config.run.split_seed)
        sources["train"].notes = whole.notes
        if not len(sources["train"]) or not len(sources["validation"]):
            raise _no_validation(config.run.validation, len(whole))
    return sources


def _no_validation(share: float, total: int) -> UserError:
    """Return the error for a share that leaves a split empty, with a share that does not."""
    one = f"--set validation={math.ceil(1000 / total) / 1000:g} holds out one or more, " if total > 1 else ""
    return UserError(
        f"validation={share:g}: of {total} samples this leaves none for a split; {one}--set validation=0 holds out none"
    )
