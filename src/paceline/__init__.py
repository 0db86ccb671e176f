"""Paceline trains image models on one device or many, from one recipe.

    import paceline

    result = paceline.train("classification", data="digits", preset="quick", out="runs/first")
    model = paceline.load(result.folder)
    probabilities = model.predict(images)

Importing this package does not import torch. Torch is imported when one of the package's names is first used.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Literal

    import torch

    from paceline.commands.train import TrainResult
    from paceline.commands.verify import Difference, VerifyResult
    from paceline.config.settings import RunSettings, setting
    from paceline.contracts.data_spec import DataSpec
    from paceline.contracts.recipe import Batch, Clock, Draw, Evaluation, Loss, Phase, Recipe, Weights
    from paceline.core.errors import UserError
    from paceline.core.types import SettingValue, SettingValues, StrPath
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
    "Case",
    "Clock",
    "DataSpec",
    "Difference",
    "Draw",
    "Evaluation",
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
    "VerifyResult",
    "Weights",
    "load",
    "setting",
    "train",
    "verify",
]
_MODULES = {  # the modules that define the public names, imported when a name is first used
    "paceline.commands.train": ("TrainResult",),
    "paceline.commands.verify": ("Difference", "VerifyResult"),
    "paceline.config.settings": ("RunSettings", "setting"),
    "paceline.contracts.data_spec": ("DataSpec",),
    "paceline.contracts.recipe": ("Batch", "Clock", "Draw", "Evaluation", "Loss", "Phase", "Recipe", "Weights"),
    "paceline.core.errors": ("UserError",),
    "paceline.data.loader": ("Loader",),
    "paceline.data.source": ("ArraySource", "Source"),
    "paceline.evaluation.contract": ("Case", "Evaluator"),
    "paceline.inference.model": ("Model",),
    "paceline.parallel.strategy": ("Strategy",),
    "paceline.runs.logger": ("Logger",),
}


def train(
    recipe: StrPath,
    *,
    data: StrPath | None = None,
    data_root: StrPath | None = None,
    preset: str | None = None,
    out: StrPath | None = None,
    epochs: float | None = None,
    images: int | None = None,
    batch_size: int | str | None = None,
    lr: float | None = None,
    seed: int | None = None,
    init_from: StrPath | None = None,
    strategy: StrPath | None = None,
    accelerator: Literal["auto", "cpu", "cuda"] | None = None,
    devices: int | None = None,
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp64"] | None = None,
    deterministic: bool | None = None,
    workers: int | None = None,
    loggers: str | None = None,
    trust: bool = False,
    **settings: SettingValue | Mapping[str, SettingValue],
) -> TrainResult:
    """Train a recipe and return the run folder, the metrics and the exit code.

    Settings have the same names as on the command line: `--batch-size 64` is `batch_size=64`. None leaves a setting at
    its default, which depends on the recipe and the preset. Repeat the same call to resume an interrupted run.

    Args:
        recipe: The name of a recipe, or the path to your own .py file.
        data: The name of a data source, or the path to your own .py file.
        data_root: The folder that the source's files are in, or are downloaded to.
        preset: The name of a set of settings defined by the recipe.
        out: The run folder; runs/RECIPE-DATA-SEED by default.
        epochs: The length of training in epochs.
        images: The length of training in images; overrides `epochs`.
        batch_size: The number of images per step across all devices; "32/device" means 32 per device.
        lr: The peak learning rate.
        seed: The seed for initial weights, sample order, augmentation and noise.
        init_from: A run folder or a file (.safetensors, .pth) with initial weights.
        strategy: "single", "dp", "ddp", "fsdp", "lightning" or the path to your own .py file.
        accelerator: The type of device to run on; "auto" selects "cuda" if there is a GPU.
        devices: The number of devices to train on.
        precision: The precision of the computation; "auto" selects "bf16" on GPUs that support it, else "fp32".
        deterministic: Whether to make repeated runs on GPUs bit-identical, at the cost of some speed.
        workers: The number of worker processes per device that load data.
        loggers: Comma-separated loggers that also receive metrics and samples: names or .py files.
        trust: Allow Paceline to load .py files that the run given as `features` refers to and that this program has not
            imported yet.
        **settings: Any other setting listed by `paceline settings RECIPE`. To set values for a single network, pass a
            dict under its name: `discriminator={"lr": 4e-4}`.

    Returns:
        The run folder and metrics. Check `ok`: it is False if a signal stopped the run before it finished.

    Raises:
        UserError: If the input is wrong, for example an unknown setting or a missing file.

    Examples:
        >>> result = paceline.train("classification", preset="quick", epochs=1, out="runs/first")
        >>> result.folder
        PosixPath('runs/first')
    """
    from paceline.commands.configure import configure
    from paceline.commands.train import train_and_report
    from paceline.core.trust import trusting

    place = _given(strategy=strategy, accelerator=accelerator, devices=devices, precision=precision, workers=workers)
    length = _given(epochs=epochs, images=images, batch_size=batch_size, lr=lr, seed=seed, deterministic=deterministic)
    files = _given(data=data, data_root=data_root, preset=preset, out=out, init_from=init_from, loggers=loggers)
    with trusting(trust):
        return train_and_report(configure(os.fspath(recipe), {**files, **length, **place, **_given(**settings)}))


def load(
    run: StrPath,
    checkpoint: str | int = "best",
    device: str | torch.device | None = None,
    *,
    trust: bool = False,
) -> Model:
    """Load a run's trained model; the training data is not needed.

    Args:
        run: A run folder or a weights file.
        checkpoint: "best", "last", or the number of images seen at the checkpoint.
        device: "cpu", "cuda" or "cuda:1"; by default, a GPU if there is one.
        trust: Allow the run's recipe to be loaded from a .py file that this program has not imported yet.

    Raises:
        UserError: If the run, checkpoint or device does not exist, a file is damaged, or the run needs untrusted code.

    Examples:
        >>> model = paceline.load("runs/first", checkpoint="last", device="cpu")
        >>> model.spec.height, model.spec.width
        (8, 8)
    """
    from paceline.inference.model import load as load_model

    return load_model(os.fspath(run), str(checkpoint), device, trust=trust)


def verify(
    recipe: StrPath,
    strategies: Sequence[str] = ("single", "ddp"),
    steps: int = 20,
    tolerance: float = 1e-9,
    *,
    data: StrPath | None = None,
    data_root: StrPath | None = None,
    preset: str | None = None,
    batch_size: int | str | None = None,
    seed: int | None = None,
    accelerator: Literal["auto", "cpu", "cuda"] | None = None,
    devices: int = 2,
    **settings: SettingValue | Mapping[str, SettingValue],
) -> VerifyResult:
    """Check in float64 that a recipe produces the same weights under all strategies.

    Each strategy runs the same training steps with the recipe's `small` settings. Its gradients and weights are
    compared with those from the first strategy.

    Args:
        recipe: The name of a recipe, or the path to your own .py file.
        strategies: At least two different strategies: names, or paths to your own .py files.
        steps: The number of training steps, at least 1.
        tolerance: The largest allowed difference between weights, relative to the largest weight in the network.
        data: Same as in `train`.
        data_root: Same as in `train`.
        preset: Same as in `train`.
        batch_size: Same as in `train`.
        seed: Same as in `train`.
        accelerator: Same as in `train`.
        devices: The number of devices (on a CPU: processes) that each batch is divided among.
        **settings: Any other setting listed by `paceline settings RECIPE`.

    Returns:
        The differences for each strategy and network. `ok` is True if all are within their tolerance.

    Raises:
        UserError: If the input is wrong, for example an unknown strategy, or if a worker process fails.

    Examples:
        >>> result = paceline.verify("classification", ("single", "ddp"), steps=2, accelerator="cpu", width=2)
        >>> result.ok
        True
        >>> result.differences[-1]
        Difference(ddp, weights of classifier, ..., ok)
    """
    from paceline.commands.configure import configure
    from paceline.commands.verify import VerifyResult, differences

    named = _given(data=data, data_root=data_root, preset=preset, batch_size=batch_size, seed=seed)
    place = _given(accelerator=accelerator, devices=devices)
    config = configure(os.fspath(recipe), {**named, **place, **_given(**settings)}, small=True)
    return VerifyResult(tuple(differences(config, list(strategies), steps, tolerance)))


def _given(**settings: os.PathLike[str] | SettingValue | Mapping[str, SettingValue] | None) -> SettingValues:
    """Return the settings that are not None, with paths converted to strings."""
    as_text = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in settings.items()}
    return {name: value for name, value in as_text.items() if value is not None}


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept any attribute name

    def __getattr__(name: str) -> Any:
        module = next((module for module, names in _MODULES.items() if name in names), None)
        if module is None:
            raise AttributeError(f"module 'paceline' has no attribute {name!r}; choose from: {', '.join(__all__)}")
        return getattr(importlib.import_module(module), name)
