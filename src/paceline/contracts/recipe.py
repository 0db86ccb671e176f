"""The recipe contract: what learns, in which phases, from which losses.

A recipe knows no device, process, precision, optimizer step or file. The engine calls
`forward(phase, batch)`, which is the one entry that autocast, DataParallel, DistributedDataParallel
and Lightning wrap, and updates the networks that the phases name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from paceline.core.errors import UserError, unknown

Batch = dict[str, Tensor]  # dimension 0 of every tensor is the sample


class Loss(NamedTuple):
    """What one phase computes from one batch."""

    terms: dict[str, Tensor]  # weighted means over samples; the engine sums and logs them
    shared: dict[str, Tensor] = {}  # per sample: added to the batch of later phases of this step, detached
    signals: dict[str, Tensor] = {}  # scalars: averaged over micro-batches, replicas and ranks, for later phases


class Phase(NamedTuple):
    """One network updated by its own loss; a step runs the phases in order."""

    name: str  # its loss is the recipe's method `<name>_loss`
    network: str  # the submodule that it updates; several phases may name one
    every: int = 1  # runs every nth step (lazy penalties)
    repeat: int = 1  # times per step, each with new data (critics); only the first has what earlier phases shared
    concurrent: bool = False  # needs nothing of the phase before it, so the two may run at the same time


class Draw(NamedTuple):
    """Random numbers that the engine fills into the batch, per sample, from (seed, images seen, name)."""

    shape: tuple[int, ...]
    kind: str = "normal"  # or "uniform" in [0, 1)
    common: bool = False  # one row for all samples of the global batch: a choice that every part makes alike


@dataclass(frozen=True)
class DataSpec:
    """What a source says about its samples, for the recipe that learns from them."""

    channels: int
    height: int
    width: int
    num_classes: int = 0
    class_names: tuple[str, ...] = ()
    flip_allowed: bool = True  # a mirrored sample is still a sample (false for digits and letters)
    scale: int = 0  # the field "low" is "image" made smaller by this; 0 where there is none
    panels: tuple[str, ...] = ()  # the fields that belong to "image" by name, in order, "segmentation" last


@dataclass(frozen=True)
class NoSettings:
    """A recipe without settings of its own."""


class Recipe(nn.Module):
    """Networks, phases and losses. Subclass it in a file of its own: the file's name is the recipe's name."""

    Settings: ClassVar[type] = NoSettings  # a frozen dataclass; each field is a setting of the command
    defaults: ClassVar[dict[str, Any]] = {}  # settings of the run where the recipe knows better
    presets: ClassVar[dict[str, dict[str, Any]]] = {}  # named sets of settings: `--preset NAME`
    small: ClassVar[dict[str, Any]] = {}  # settings that make a step cheap, for `verify` and self-tests
    aliases: ClassVar[dict[str, str]] = {}  # other programs' names of settings, in `--config` files; "" for none
    evaluator: ClassVar[str] = ""  # the module of paceline.evaluation that measures `predict`
    evaluated_on: ClassVar[str] = "validation"  # the split that it is measured on while training
    # The metric that chooses the best checkpoint, without what its name has in [brackets], and its good end.
    best: tuple[str, str] = ("", "max")
    needs: ClassVar[tuple[str, ...]] = ()  # fields of a sample without which nothing can be learned
    refuses: ClassVar[dict[str, str]] = {}  # fields that it would pass over, each with the recipe that is for them
    generates: ClassVar[bool] = False  # `predict` makes its "image", in -1…1, from the draws alone
    # Settings that change what the networks compute while their weights still fit: `--init-from` wants them alike.
    must_match_weights: ClassVar[tuple[str, ...]] = ()
    # Values of the setting `stage` that mean several runs in a row, each from the best weights of the one before.
    stages: ClassVar[dict[str, tuple[str, ...]]] = {}

    phases: tuple[Phase, ...] = ()
    draws: dict[str, Draw] = {}
    signals: dict[str, float] = {}  # facts that a phase reads, with their values before the first step
    ema: tuple[str, ...] = ()  # networks judged through their moving average
    double_backward: tuple[str, ...] = ()  # networks whose gradient is itself differentiated (R1)
    output_scale: int = 1  # how many times as high and wide the pictures of `restore` are as those that it gets

    @classmethod
    def check(cls, settings: Any) -> None:
        """Refuses what would end training later, like a file that is not there; asked before the first stage."""

    def __init__(self, settings: Any, spec: DataSpec) -> None:
        super().__init__()

    def forward(self, phase: str, batch: Batch) -> Loss:
        """The loss of one phase on one batch."""
        return getattr(self, f"{phase}_loss")(batch)

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """What the recipe makes of a batch, for metrics and samples; per sample."""
        raise NotImplementedError(f"{type(self).__name__} has no predict(): it cannot be evaluated or sampled")

    def preview(self, batch: Batch) -> dict[str, Tensor]:
        """Pictures in -1…1 of one size by caption, to be seen side by side for each sample; none, by default."""
        return {}

    def image_to_image(self, pictures: Tensor) -> dict[str, Tensor]:
        """What the recipe makes of pictures in -1…1 of any size, by name; the one that matters is "image"."""
        raise NotImplementedError(f"{type(self).__name__} has no image_to_image(): it cannot be applied to images")

    def check_phases(self, name: str) -> None:
        """Refuses phases without a loss, or of a network that is not there; `name` is the recipe's, for a person."""
        if not self.phases:
            raise UserError(f"recipe {name!r}: has no phases; give it phases = (Phase(NAME, NETWORK),)")
        for phase in self.phases:
            method, made = f"{phase.name}_loss", type(self).forward is not Recipe.forward
            if not made and not callable(getattr(self, method, None)):
                others = [one for one in dir(type(self)) if one.endswith("_loss")]
                hint = f"; it has {', '.join(others)}" if others else ""
                raise UserError(f"recipe {name!r}: phase {phase.name!r} needs a method {method}(self, batch){hint}")
            if phase.network not in dict(self.named_modules()):
                found = [child for child, _ in self.named_children()]
                told = unknown("network", phase.network, found)
                raise UserError(f"recipe {name!r}: phase {phase.name!r} names an {told}")

    @property
    def networks(self) -> dict[str, nn.Module]:
        """The networks that learn, by name, in the order of their first phase."""
        return {phase.network: self.get_submodule(phase.network) for phase in self.phases}

    @property
    def single_networks(self) -> dict[str, nn.Module]:
        """The same, those of a group that learns together (an nn.ModuleDict) one by one, as GROUP.NAME."""
        found: dict[str, nn.Module] = {}
        for name, network in self.networks.items():
            if isinstance(network, nn.ModuleDict):
                found |= {f"{name}.{key}": one for key, one in network.items()}
            else:
                found[name] = network
        return found
