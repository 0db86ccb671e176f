"""Paceline trains image models on one device or many, from one recipe.

    import paceline

    result = paceline.train("classification", data="digits", preset="quick", out="runs/first")
    model = paceline.load(result.folder)
    probabilities = model.predict(images)

Importing this package does not import torch; the first use of a name does.
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
    from paceline.config.setting import setting
    from paceline.config.settings import RunSettings
    from paceline.contracts.data_spec import DataSpec
    from paceline.contracts.phase import Batch, Best, Draw, Loss, Phase
    from paceline.contracts.recipe import Recipe
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
    "Best",
    "Case",
    "DataSpec",
    "Difference",
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
    "VerifyResult",
    "load",
    "setting",
    "train",
    "verify",
]
_MODULES = {  # imported when a name is first used
    "ArraySource": "paceline.data.source",
    "Batch": "paceline.contracts.phase",
    "Best": "paceline.contracts.phase",
    "Case": "paceline.evaluation.contract",
    "DataSpec": "paceline.contracts.data_spec",
    "Difference": "paceline.commands.verify",
    "Draw": "paceline.contracts.phase",
    "Evaluator": "paceline.evaluation.contract",
    "Loader": "paceline.data.loader",
    "Logger": "paceline.runs.logger",
    "Loss": "paceline.contracts.phase",
    "Model": "paceline.inference.model",
    "Phase": "paceline.contracts.phase",
    "Recipe": "paceline.contracts.recipe",
    "RunSettings": "paceline.config.settings",
    "Source": "paceline.data.source",
    "Strategy": "paceline.parallel.strategy",
    "TrainResult": "paceline.commands.train",
    "UserError": "paceline.core.errors",
    "VerifyResult": "paceline.commands.verify",
    "setting": "paceline.config.setting",
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
    **settings: SettingValue | Mapping[str, SettingValue],
) -> TrainResult:
    """Train a recipe, and return where the run is and how it ended.

    Settings have the names of the command line: `--batch-size 64` is `batch_size=64`. None leaves a setting at its
    default, which depends on the recipe and the preset. The same call again resumes the run.

    Args:
        recipe: The recipe: a name, or the path of your own .py file.
        data: The source of the data: a name, or the path of your own .py file.
        data_root: The folder that holds the source's files, or that a download is saved to.
        preset: A named set of the recipe's settings.
        out: The run's folder; runs/RECIPE-DATA-SEED by default.
        epochs: The length of training in epochs.
        images: The length of training in images; overrides `epochs`.
        batch_size: Images per step over all devices, or per device: "32/device".
        lr: The peak learning rate.
        seed: The seed of initial weights, sample order, augmentation and noise.
        init_from: A run's folder or a .safetensors file with initial weights.
        strategy: "single", "dp", "ddp", "lightning" or the path of your own .py file.
        accelerator: The kind of device to run on; "auto" is "cuda" if there is a GPU.
        devices: The number of devices that share the run.
        precision: The precision of the computation; "auto" is "bf16" on GPUs that support it, else "fp32".
        deterministic: Make repeated runs on GPUs bit-identical, at some cost in speed.
        workers: Worker processes per device that load data.
        loggers: Loggers besides the run's own files: names or .py files, with commas.
        **settings: Any other setting that `paceline settings RECIPE` lists. Those of one network are a dict:
            `discriminator={"lr": 4e-4}`.

    Returns:
        The run's folder and metrics. Check `ok`: a run that was stopped by a signal returns, too.

    Raises:
        UserError: For what the user can fix, such as an unknown setting or a missing file.

    Examples:
        >>> result = paceline.train("classification", preset="quick", epochs=1, out="runs/first")
        >>> result.folder
        PosixPath('runs/first')
    """
    from paceline.commands.configure import configure
    from paceline.commands.train import train_and_report

    place = _given(strategy=strategy, accelerator=accelerator, devices=devices, precision=precision, workers=workers)
    length = _given(epochs=epochs, images=images, batch_size=batch_size, lr=lr, seed=seed, deterministic=deterministic)
    files = _given(data=data, data_root=data_root, preset=preset, out=out, init_from=init_from, loggers=loggers)
    return train_and_report(configure(os.fspath(recipe), {**files, **length, **place, **_given(**settings)}))


def load(
    run: StrPath,
    checkpoint: str | int = "best",
    device: str | torch.device | None = None,
    *,
    trust: bool = False,
) -> Model:
    """Return the trained model of a run, without its data.

    Args:
        run: A run's folder or a weights file.
        checkpoint: "best", "last" or a number of images seen.
        device: "cpu", "cuda" or "cuda:1"; by default a GPU if there is one.
        trust: Run the code of a recipe in a .py file that the run names, even if this program has not used it yet.

    Raises:
        UserError: If there is no such run, checkpoint or device, a file is damaged, or the run names code to run.

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
    """Check in float64 that a recipe gives the same weights under each strategy.

    Every strategy trains the same steps, with the recipe's `small` settings, and is compared with the first.

    Args:
        recipe: The recipe: a name, or the path of your own .py file.
        strategies: At least two names or paths of your own .py files.
        steps: The number of training steps.
        tolerance: The largest difference of weights allowed, relative to the largest weight of the network.
        data: As for `train`.
        data_root: As for `train`.
        preset: As for `train`.
        batch_size: As for `train`.
        seed: As for `train`.
        accelerator: As for `train`.
        devices: The number of devices, or of processes on a CPU, that share a batch.
        **settings: Any other setting that `paceline settings RECIPE` lists.

    Returns:
        The difference of every network under every strategy; `ok` if all are within their tolerance.

    Raises:
        UserError: For what the user can fix, such as an unknown strategy, and if a worker process fails.

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
    """Return the settings that are not None, paths as text."""
    as_text = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in settings.items()}
    return {name: value for name, value in as_text.items() if value is not None}


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # or a type checker would accept every name

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module 'paceline' has no attribute {name!r}; it has {', '.join(__all__)}")
        return getattr(importlib.import_module(_MODULES[name]), name)
