"""The recipe contract: which networks are trained, in which phases, by which losses.

A recipe knows no device, process, precision, optimizer step or file. The engine calls
`forward(phase, batch)`, the one entry point that autocast, DataParallel, DistributedDataParallel and
Lightning wrap, and updates the networks that the phases name.

A recipe file needs nothing else of the contracts: `DataSpec` is exported from here, too.
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

Batch = dict[str, Tensor]  # dimension 0 of every tensor is the sample


class Loss(NamedTuple):
    """What one phase computes from one batch."""

    terms: dict[str, Tensor]  # weighted means over samples; the engine sums and logs them
    shared: dict[str, Tensor] = {}  # per sample: added to the batch of later phases of this step, detached
    signals: dict[str, Tensor] = {}  # scalars: averaged over micro-batches, replicas and ranks, for later phases


class Phase(NamedTuple):
    """One network updated by its own loss; a step runs the phases in order."""

    name: str  # its loss is the recipe's method `<name>_loss`
    network: str  # the submodule that it updates; several phases may name the same one
    every: int = 1  # runs at every nth step (lazy regularisation)
    repeat: int = 1  # times per step, each with new data (critics); only the first sees what earlier phases shared
    concurrent: bool = False  # independent of the phase before it: both may run at the same time


class Draw(NamedTuple):
    """Random numbers per sample that the engine adds to the batch, from (seed, images seen, name)."""

    shape: tuple[int, ...]
    kind: str = "normal"  # or "uniform" in [0, 1)
    common: bool = False  # one row for the whole global batch: a choice that is the same on every device


class Best(NamedTuple):
    """The metric that chooses the best checkpoint."""

    metric: str = ""  # SPLIT/NAME, without what the name has in [brackets]; "": the last checkpoint counts
    mode: Literal["min", "max"] = "max"  # whether a smaller or a larger value is better


@dataclass(frozen=True)
class NoSettings:
    """A recipe without settings of its own."""


class Recipe(nn.Module):
    """Networks, phases and losses. Subclass it in a file of its own: the file's name is the recipe's name."""

    # Settings
    Settings: ClassVar[type] = NoSettings  # a frozen dataclass; each field is a setting: `--set name=value`
    defaults: ClassVar[SettingValues] = {}  # settings of the run and its learners that suit this recipe
    presets: ClassVar[Mapping[str, SettingValues]] = {}  # named sets of settings: `--preset NAME`
    small: ClassVar[SettingValues] = {}  # settings that make a step cheap, for `verify` and self-tests
    aliases: ClassVar[Mapping[str, str]] = {}  # another program's setting names in `--config` files → ours; "": ignored
    must_match_weights: ClassVar[
        tuple[str, ...]
    ] = ()  # settings that `--init-from` needs unchanged, as weights fit both
    stages: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # values of the setting `stage` that stand for several runs

    # Data
    required_fields: ClassVar[tuple[str, ...]] = ()  # fields that every sample must have
    rejected_fields: ClassVar[Mapping[str, str]] = {}  # it would ignore these; each with the recipe that uses them
    importer: ClassVar[str] = ""  # reads other projects' weight files: a module of paceline.recipes.importers

    # Evaluation
    evaluator: ClassVar[str] = ""  # measures `predict`: a module of paceline.evaluation.evaluators
    evaluated_on: ClassVar[str] = "validation"  # the split that it is measured on during training
    best: Best = Best()  # the metric that chooses the best checkpoint, and its mode: "min" or "max"
    generates: ClassVar[bool] = False  # `predict` makes its "image", in -1…1, from the draws alone
    output_scale: int = 1  # height and width of `image_to_image`'s results, relative to its input

    # Training
    phases: tuple[Phase, ...] = ()  # what a step runs, in order
    draws: dict[str, Draw] = {}  # random numbers that the losses and `predict` read from the batch
    signals: dict[str, float] = {}  # signals that a phase reads from the batch, with their values at the first step
    ema: tuple[str, ...] = ()  # networks that are evaluated by the EMA of their weights
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
        """Return what metrics and samples are made of, per sample."""
        raise NotImplementedError(f"{type(self).__name__} has no predict(): it cannot be evaluated or sampled")

    def preview(self, batch: Batch) -> dict[str, Tensor]:
        """Return images in -1…1 of one size by caption, shown side by side for each sample; none by default."""
        return {}

    def image_to_image(self, images: Tensor) -> dict[str, Tensor]:
        """Return what the recipe makes of images in -1…1 of any size, by name; the main result is "image"."""
        raise NotImplementedError(f"{type(self).__name__} has no image_to_image(): it cannot be applied to images")

    def check_phases(self, name: str) -> None:
        """Raise UserError for a phase without a loss or a network; `name` is the recipe's, for the message."""
        if not self.phases:
            raise UserError(f"recipe {name!r}: has no phases; give it phases = (Phase(NAME, NETWORK),)")
        for phase in self.phases:
            method, has_own_forward = f"{phase.name}_loss", type(self).forward is not Recipe.forward
            if not has_own_forward and not callable(getattr(self, method, None)):
                others = [attribute for attribute in dir(type(self)) if attribute.endswith("_loss")]
                hint = f"; it has {', '.join(others)}" if others else ""
                raise UserError(f"recipe {name!r}: phase {phase.name!r} needs a method {method}(self, batch){hint}")
            if phase.network not in dict(self.named_modules()):
                children = [child for child, _ in self.named_children()]
                problem = unknown("network", phase.network, children)
                raise UserError(f"recipe {name!r}: phase {phase.name!r} names an {problem}")

    @property
    def networks(self) -> dict[str, nn.Module]:
        """The networks that are trained, by name, in the order of their first phase."""
        return {phase.network: self.get_submodule(phase.network) for phase in self.phases}

    @property
    def single_networks(self) -> dict[str, nn.Module]:
        """The same, with the networks of a group (an nn.ModuleDict) one by one, as GROUP.NAME."""
        found: dict[str, nn.Module] = {}
        for name, network in self.networks.items():
            if isinstance(network, nn.ModuleDict):
                found |= {f"{name}.{key}": member for key, member in network.items()}
            else:
                found[name] = network
        return found
