"""Opens the sources of a run, one for each split, and names its data."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from paceline.config.resolve import Config
from paceline.config.settings import RunSettings
from paceline.config.spans import is_never
from paceline.contracts.data_spec import LARGEST, DataSpec
from paceline.core.errors import UserError, check_parameters
from paceline.core.registry import is_path, load_class
from paceline.data.source import Source, split_off


def open_sources(config: Config, split: str = "") -> dict[str, Source]:
    """Return the run's sources by split: train, test if the source has one, and validation if samples are held out.

    If `split` is given and is stored separately from the training samples, only that split is opened.
    """
    source_class = load_class("source", config.run.data, Source)
    settings, splits = settings_and_splits(config)
    if split != "train" and split in splits:
        return {split: _open(source_class, split, settings)}
    # A source without training samples raises an error.
    sources = {split: _open(source_class, split, settings) for split in dict.fromkeys(("train", *splits))}
    return sources | _hold_out(config.run, sources["train"])


def open_training_samples(config: Config) -> Source:
    """Return the samples that a run is trained on, without opening its test split."""
    source_class = load_class("source", config.run.data, Source)
    return _hold_out(config.run, _open(source_class, "train", settings_and_splits(config)[0]))["train"]


def _open(source_class: type[Source], split: str, settings: RunSettings) -> Source:
    """Open one split; raise UserError if the source's class does not follow the contract."""
    shown = f"--data {settings.data}"
    for name in ("__init__", "__len__", "read"):
        if getattr(source_class, name) is getattr(Source, name):
            raise UserError(f"{shown}: {source_class.__name__} has no method {name}; define it")
    check_parameters(f"{shown}: __init__(self, split, settings)", source_class, split, settings)
    source = source_class(split, settings)
    if not isinstance(getattr(source, "spec", None), DataSpec):
        raise UserError(f"{shown}: self.spec is not a DataSpec; set it in __init__")
    if source.spec.num_classes > LARGEST:
        most = f"at most {LARGEST:,} are supported"
        raise UserError(f"{shown}: has {source.spec.num_classes:,} classes, but {most}; number them without gaps")
    if not isinstance(length := source.__len__(), int | np.integer) or length < 0:
        raise UserError(f"{shown}: __len__ returns {length!r}; return the number of samples")
    return source


def check_evaluated(config: Config, sources: Mapping[str, Source]) -> None:
    """Raise UserError if a recipe is evaluated on held-out samples, but there are none."""
    recipe_class, run = config.recipe_class, config.run
    is_evaluated = recipe_class.evaluation.evaluator and not is_never(run.evaluate_every)
    if is_evaluated and recipe_class.evaluation.split != "train" and not sources.keys() & {"validation", "test"}:
        raise UserError(
            f"--data {run.data}: has no test split, and validation={run.validation:g} holds out no samples to evaluate "
            "the model; use --set validation=0.1, or --set evaluate_every=never"
        )


def settings_and_splits(config: Config) -> tuple[RunSettings, Sequence[str]]:
    """Return the settings of a run's sources, and the splits that the run uses.

    A recipe that is evaluated against its training images needs no held-out images. If the source would hold some out,
    the training split consists of all images, and there is no test split.
    """
    source_class = load_class("source", config.run.data, Source)
    if config.recipe_class.evaluation.split == "train":
        whole = source_class.measure_whole(config.run)
        if whole != config.run:
            return whole, ("train",)
    return config.run, source_class.splits_of(config.run)


def _hold_out(run: RunSettings, whole: Source) -> dict[str, Source]:
    """Return the training samples and, if samples are held out, the validation samples."""
    if not run.validation:
        return {"train": whole}
    train, validation = split_off(whole, run.validation, run.split_seed)
    train.notes, train.not_used, train.class_advice = whole.notes, whole.not_used, whole.class_advice
    if not len(train) or not len(validation):
        share = f"--set validation={math.ceil(1000 / max(1, len(whole))) / 1000:g} to hold out at least one sample, or "
        raise UserError(
            f"validation={run.validation:g}: leaves a split empty (samples available: {len(whole)}); "
            f"use {share if len(whole) > 1 else ''}--set validation=0 to hold out no samples"
        )
    return {"train": train, "validation": validation}


MAX_LENGTH = 80


def data_name(source: str, root: str) -> str:
    """Return the name of the data: of its source or, if the source reads any data, of the file or folder that it reads.

    For example, `cifar10` for the source `cifar10`, and for the source `npz` with the file `cifar10.npz`. A source in a
    user's own file is not loaded, because the name of a run's data must not require trust in its code.
    """
    name = clean_name(Path(source).stem)
    is_default = root in ("", RunSettings.data_root)
    if is_default or is_path(source) or not load_class("source", source, Source).reads_any_data:
        return name
    place = urlsplit(root).path if "://" in root else root  # host and query may contain credentials
    return clean_name(Path(place).name.removesuffix(".npz")) or name


def clean_name(text: str) -> str:
    """Return text that can be part of a metric's name."""
    return re.sub(r"[^\w.-]+", "-", text)[:MAX_LENGTH].strip("-")
