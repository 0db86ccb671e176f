"""The recipe contract: which networks are trained, in which phases, with which losses.

A recipe knows nothing about devices, processes, precision, optimizer steps or files. The engine calls
`forward(phase, batch)`, the single entry point that autocast, DataParallel, DistributedDataParallel and
Lightning wrap, and updates the networks that the phases refer to.

A recipe file needs no other contract module: `DataSpec` is exported from here, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor, nn

from paceline.contracts.data_spec import DataSpec
from paceline.core.errors import UserError, unknown
from paceline.core.types import SettingValues

__all__ = ["Batch", "Best", "DataSpec", "Draw", "Loss", "NoSettings", "Phase", "Recipe"]

Batch = dict[str, Tensor]  # dimension 0 of every tensor is the batch dimension


class Loss(NamedTuple):
    """The result of one phase on one batch."""

    terms: dict[str, Tensor]  # weighted means over samples; the engine sums and logs them
    shared: dict[str, Tensor] = {}  # per sample: detached and added to the batch for later phases of this step
    signals: dict[str, Tensor] = {}  # scalars for later phases: averaged over micro-batches, replicas and ranks


class Phase(NamedTuple):
    """One network updated by its own loss; a step runs the phases in order."""

    name: str  # the recipe's method `<name>_loss` returns its loss
    network: str  # the submodule to update; several phases may update the same one
    every: int = 1  # run only every nth step (lazy regularization)
    repeat: int = 1  # runs per step, each on new data (critics); only the first sees tensors shared by earlier phases
    concurrent: bool = False  # independent of the previous phase: both may run at the same time


class Draw(NamedTuple):
    """Random numbers per sample that the engine adds to the batch, determined by (seed, images seen, name)."""

    shape: tuple[int, ...]
    kind: str = "normal"  # or "uniform" in [0, 1)
    common: bool = False  # one row for the whole global batch, the same on every device


class Best(NamedTuple):
    """The metric that selects the best checkpoint."""

    metric: str = ""  # SPLIT/NAME, without the part of the name in [brackets]; "": the last checkpoint is the best
    mode: Literal["min", "max"] = "max"  # whether a smaller or a larger value is better


@dataclass(frozen=True)
class NoSettings:
    """The settings of a recipe that has none."""


class Recipe(nn.Module):
    """Networks, phases and losses. Subclass it in a separate file: the file name is the recipe's name."""

    # Settings
    Settings: ClassVar[type] = NoSettings  # a frozen dataclass; each field is a setting: `--set name=value`
    defaults: ClassVar[SettingValues] = {}  # defaults of this recipe for run and learner settings
    presets: ClassVar[Mapping[str, SettingValues]] = {}  # named sets of settings: `--preset NAME`
    small: ClassVar[SettingValues] = {}  # settings that make a step cheap, for `verify` and self-tests
    aliases: ClassVar[Mapping[str, str]] = {}  # another program's setting names in `--config` files → ours; "": ignored
    # Settings that must equal those of the `--init-from` run. A mismatch would not show in the shapes of the weights.
    must_match_weights: ClassVar[tuple[str, ...]] = ()
    stages: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # values of the setting `stage` that expand to several runs

    # Data
    needs: ClassVar[tuple[str, ...]] = ()  # fields that every sample must have
    refuses: ClassVar[Mapping[str, str]] = {}  # fields that the recipe would ignore → the recipe that uses them
    importer: ClassVar[str] = ""  # module of paceline.recipes.importers that reads other projects' weights

    # Evaluation
    evaluator: ClassVar[str] = ""  # module of paceline.evaluation.evaluators that measures `predict`
    evaluated_on: ClassVar[str] = "validation"  # split to evaluate on during training
    best: Best = Best()  # the metric that selects the best checkpoint, and its mode: "min" or "max"
    generates: ClassVar[bool] = False  # `predict` returns an "image" in [-1, 1] that depends on the draws alone
    output_scale: int = 1  # size of the results of `image_to_image`, relative to its input

    # Training
    phases: tuple[Phase, ...] = ()  # the phases of a step, in order
    draws: dict[str, Draw] = {}  # random numbers that the losses and `predict` read from the batch
    signals: dict[str, float] = {}  # signals that a phase reads from the batch, with their initial values
    ema: tuple[str, ...] = ()  # networks that are evaluated with the EMA of their weights
    double_backward: tuple[str, ...] = ()  # networks whose gradient is itself differentiated (R1)

    @classmethod
    def check(cls, settings: Any) -> None:
        """Raise UserError for settings that would fail later, such as a missing file; called before the first stage."""

    def __init__(self, settings: Any, spec: DataSpec) -> None:
        super().__init__()

    def forward(self, phase: str, batch: Batch) -> Loss:
        """Return the loss of one phase on one batch."""
        loss: Loss = getattr(self, f"{phase}_loss")(batch)
        return loss

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return per-sample tensors for the evaluator and for sample images."""
        raise NotImplementedError(f"{type(self).__name__} has no predict(): it cannot be evaluated or sampled")

    def preview(self, batch: Batch) -> dict[str, Tensor]:
        """Return images in [-1, 1] by caption, all of the same size, to be shown side by side; none by default."""
        return {}

    def image_to_image(self, images: Tensor) -> dict[str, Tensor]:
        """Apply the recipe to images in [-1, 1] of any size; return results by name, the main one as "image"."""
        raise NotImplementedError(f"{type(self).__name__} has no image_to_image(): it cannot be applied to images")

    def check_phases(self, name: str) -> None:
        """Raise UserError for a phase without a loss or a network; `name` is the recipe's name for the message."""
        if not self.phases:
            raise UserError(f"recipe {name!r}: has no phases; define phases = (Phase(NAME, NETWORK),)")
        for phase in self.phases:
            method, has_own_forward = f"{phase.name}_loss", type(self).forward is not Recipe.forward
            if not has_own_forward and not callable(getattr(self, method, None)):
                others = [attribute for attribute in dir(type(self)) if attribute.endswith("_loss")]
                hint = f"; it has {', '.join(others)}" if others else ""
                raise UserError(f"recipe {name!r}: phase {phase.name!r} needs a method {method}(self, batch){hint}")
            if phase.network not in dict(self.named_modules()):
                children = [child for child, _ in self.named_children()]
                problem = unknown("network", phase.network, children)
                raise UserError(f"recipe {name!r}: phase {phase.name!r} refers to an {problem}")

    @property
    def networks(self) -> dict[str, nn.Module]:
        """The networks that are trained, by name, in the order of their first phase."""
        return {phase.network: self.get_submodule(phase.network) for phase in self.phases}

    @property
    def single_networks(self) -> dict[str, nn.Module]:
        """The networks that are trained; those in a group (an nn.ModuleDict) are listed individually, as GROUP.NAME."""
        found: dict[str, nn.Module] = {}
        for name, network in self.networks.items():
            if isinstance(network, nn.ModuleDict):
                found |= {f"{name}.{key}": member for key, member in network.items()}
            else:
                found[name] = network
        return found
