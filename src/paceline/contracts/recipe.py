"""The recipe contract: which networks are trained, in which phases, with which losses.

A recipe knows nothing about devices, processes, precision, optimizer steps or files. The engine calls
`forward(phase, batch)`, the single entry point that autocast, DataParallel, DistributedDataParallel and
Lightning wrap, and updates the networks that the phases refer to.

A recipe file needs no other contract module: `DataSpec`, `Phase` and `Loss` are exported from here, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from paceline.contracts.data_spec import DataSpec
from paceline.contracts.phase import Batch, Best, Draw, Loss, Phase
from paceline.core.errors import UserError, unknown
from paceline.core.types import SettingValues

__all__ = ["Batch", "Best", "DataSpec", "Draw", "Loss", "NoSettings", "Phase", "Recipe"]


@dataclass(frozen=True)
class NoSettings:
    """A recipe without settings of its own."""


class Recipe(nn.Module):
    """Networks, phases and losses. Subclass it in a file of its own.

    The file's name is the recipe's name. A phase updates one network by the loss that the method `<phase>_loss`
    returns. `predict` returns what metrics and samples are made of. A loss calls no random function: declare `draws`
    instead. A recipe knows no device, process, precision, optimizer step or file.

    Examples:
        ```python
        # my_recipe.py
        import torch.nn.functional as F
        from torch import nn

        from paceline import Best, Loss, Phase, Recipe


        class MyRecipe(Recipe):
            defaults = {"data": "digits", "size": 8, "lr": 0.02}
            evaluator, best = "accuracy", Best("validation/top1")
            phases = (Phase("classifier", network="classifier"),)

            def __init__(self, settings, spec):
                super().__init__(settings, spec)
                pixels = spec.channels * spec.height * spec.width
                self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(pixels, spec.num_classes))

            def classifier_loss(self, batch):
                logits = self.classifier(batch["image"])
                return Loss({"cross_entropy": F.cross_entropy(logits, batch["label"])})

            def predict(self, batch):
                return {"logits": self.classifier(batch["image"])}
        ```

        >>> result = paceline.train("./my_recipe.py", epochs=5)
        >>> result.metrics["test/top1"] > 50
        True
    """

    # Settings
    Settings: ClassVar[type] = NoSettings
    """A frozen dataclass; each field is a setting: `--set name=value`."""
    defaults: ClassVar[SettingValues] = {}
    """Settings of the run and its learners that suit this recipe."""
    presets: ClassVar[Mapping[str, SettingValues]] = {}
    """Named sets of settings: `--preset NAME`."""
    small: ClassVar[SettingValues] = {}
    """Settings that make a step cheap, for `verify` and self-tests."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """Another program's setting names in `--config` files, and ours; "" ignores one."""
    other_names: ClassVar[Mapping[str, str]] = {}
    """Settings of other projects, and what to use instead, for the error about an unknown setting."""
    must_match_weights: ClassVar[tuple[str, ...]] = ()
    """Settings that `--init-from` needs unchanged, although weights of both values fit."""
    stages: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Values of the setting `stage` that expand to several runs."""

    # Data
    required_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that every sample must have."""
    rejected_fields: ClassVar[Mapping[str, str]] = {}
    """Fields that the recipe would ignore, mapped to the recipe that uses each."""
    importer: ClassVar[str] = ""
    """Reads other projects' weight files: a module of `paceline.recipes.importers`, or the path of a file."""

    # Evaluation
    evaluator: ClassVar[str] = ""
    """Measures `predict`: a module of `paceline.evaluation.evaluators`, or the path of a file."""
    evaluated_on: ClassVar[str] = "validation"
    """The split that it is measured on during training."""
    best: Best = Best()
    """The metric that chooses the best checkpoint, and its mode."""
    generates: ClassVar[bool] = False
    """Whether `predict` makes its "image", in [-1, 1], from the draws alone."""
    output_scale: int = 1
    """Height and width of the results of `image_to_image`, relative to its input."""
    tiles_like_training: bool = False
    """Whether `image_to_image` expects images of the training size: larger ones are cut into tiles of that size."""

    # Training
    phases: tuple[Phase, ...] = ()
    """What a step runs, in order."""
    draws: dict[str, Draw] = {}
    """Random numbers that the losses and `predict` read from the batch."""
    signals: dict[str, float] = {}
    """Signals that a phase reads from the batch, with their values at the first step."""
    ema: tuple[str, ...] = ()
    """Networks that are evaluated by the EMA of their weights."""
    double_backward: tuple[str, ...] = ()
    """Networks whose gradient is itself differentiated, for example by R1."""

    @classmethod
    def check(cls, settings: Any) -> None:
        """Raise UserError for settings that would fail later, such as a missing file.

        It is called before the first stage.
        """

    def __init__(self, settings: Any, spec: DataSpec) -> None:
        """Create the networks.

        Args:
            settings: An instance of `Settings`.
            spec: Describes the data: channels, height, width, classes.
        """
        super().__init__()

    def forward(self, phase: str, batch: Batch) -> Loss:
        """Return the loss of one phase on one batch."""
        loss: Loss = getattr(self, f"{phase}_loss")(batch)
        return loss

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return per-sample tensors for the evaluator and for sample images."""
        raise NotImplementedError(f"{type(self).__name__} has no predict(): it cannot be evaluated or sampled")

    def preview(self, batch: Batch) -> dict[str, Tensor]:
        """Return images by caption, shown side by side for each sample.

        They are in [-1, 1] and of one size. By default there are none.
        """
        return {}

    def image_to_image(self, images: Tensor) -> dict[str, Tensor]:
        """Return what the recipe makes of images of any size, by name.

        Images are in [-1, 1]. The main result is "image".
        """
        raise NotImplementedError(f"{type(self).__name__} has no image_to_image(): it cannot be applied to images")

    def check_phases(self, name: str) -> None:
        """Raise UserError for a phase without a loss or a network.

        `name` is the recipe's name for the message.
        """
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
        """The trained networks by name, in the order of their first phase."""
        return {phase.network: self.get_submodule(phase.network) for phase in self.phases}

    @property
    def single_networks(self) -> dict[str, nn.Module]:
        """The trained networks, those of an nn.ModuleDict one by one, as GROUP.NAME."""
        found: dict[str, nn.Module] = {}
        for name, network in self.networks.items():
            if isinstance(network, nn.ModuleDict):
                found |= {f"{name}.{key}": member for key, member in network.items()}
            else:
                found[name] = network
        return found
