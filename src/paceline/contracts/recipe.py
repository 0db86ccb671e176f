"""The base class for recipes, which define the networks, the training phases and their losses.

A recipe contains no code for devices, processes, precision, optimizer steps or files. The engine calls
`forward(phase, batch)`, the single entry point that autocast, DataParallel, DistributedDataParallel and
Lightning wrap, and updates the networks that the phases refer to.

This module also exports `DataSpec`, `Phase`, `Loss` and the other names that a recipe file needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from paceline.contracts.data_spec import DataSpec
from paceline.contracts.phase import CLASS_DRAW, Batch, Clock, Draw, Evaluation, Loss, Phase, Weights
from paceline.core.errors import UserError, check_parameters, unknown
from paceline.core.types import SettingValues

__all__ = [
    "CLASS_DRAW",
    "Batch",
    "Clock",
    "DataSpec",
    "Draw",
    "Evaluation",
    "Loss",
    "NoSettings",
    "Phase",
    "Recipe",
    "Weights",
]


@dataclass(frozen=True)
class NoSettings:
    """The settings class for recipes that have no settings."""


class Recipe(nn.Module):
    """Networks, phases and losses. Subclass it in a separate file.

    The file name is the name of the recipe. A phase updates one network with the loss that the method `<phase>_loss`
    returns. `predict` returns the tensors from which metrics and sample images are computed. A loss must not call
    random functions; declare `draws` instead. A recipe contains no code for devices, processes, precision, optimizer
    steps or files.

    Examples:
        ```python
        # my_recipe.py
        import torch.nn.functional as F
        from torch import nn

        from paceline import Evaluation, Loss, Phase, Recipe


        class MyRecipe(Recipe):
            defaults = {"data": "digits", "size": 8, "lr": 0.02}
            evaluation = Evaluation("accuracy", best="validation/top1")
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
    """A frozen dataclass. Each field is a setting: `--set name=value`."""
    defaults: ClassVar[SettingValues] = {}
    """Default values for run settings, such as the batch size and the learning rate."""
    presets: ClassVar[Mapping[str, SettingValues]] = {}
    """Named sets of settings: `--preset NAME`."""
    small: ClassVar[SettingValues] = {}
    """Settings that make a training step cheap, used by `verify` and the self-tests."""
    other_names: ClassVar[Mapping[str, str]] = {}
    """Setting names from other projects, with advice on what to use instead, shown for an unknown setting.

    If the advice is a setting's name, `--config` files may use the other name for it. If it is "", they may contain the
    name, which is ignored.
    """
    stages: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Maps each value of the `stage` setting that stands for several stages to the names of those stages."""

    # Data
    required_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that every sample must have."""
    rejected_fields: ClassVar[Mapping[str, str]] = {}
    """Maps sample fields that the recipe does not use, and therefore rejects, to a recipe that uses them."""
    weights: Weights = Weights()
    """Weights from elsewhere that the recipe can start from."""

    # Evaluation
    evaluation: Evaluation = Evaluation()
    """The evaluator, the split that is evaluated during training, and the metric that selects the best checkpoint."""
    generates: ClassVar[bool] = False
    """Whether `predict` generates an "image" with values in [-1, 1] from random inputs (`draws`) alone."""
    output_scale: int = 1
    """The scale factor of `image_to_image`: output height and width relative to the input."""
    window_px: tuple[int, int] | None = None
    """Height and width of the network's training input, if larger images must be processed in windows of that size.

    `apply` divides images into windows before it calls `image_to_image`. `predict` must do so itself.
    """

    # Training
    phases: tuple[Phase, ...] = ()
    """The phases of a step, in order."""
    draws: dict[str, Draw] = {}
    """Random inputs that the losses and `predict` read from the batch."""
    signals: Mapping[str, float | Callable[[Clock], float]] = {}
    """Scalars that the losses read from the batch.

    A signal that a phase passes to later phases has an initial value. A scheduled signal is a function of the Clock,
    computed before each step.
    """
    must_vary: tuple[str, ...] = ()
    """Loss terms or signals (PHASE/NAME) that are zero only if a network has collapsed.

    Training stops with an error if one of them is zero for a whole log interval, or in the last step before a
    checkpoint is saved.
    """
    ema: tuple[str, ...] = ()
    """Networks whose EMA weights are used for evaluation.

    If they contain BatchNorm layers, `predict` is also called with training samples, to recompute the statistics.
    """
    double_backward: tuple[str, ...] = ()
    """Networks that need second-order gradients, for example for R1."""
    blocks: Mapping[str, tuple[str, ...]] = {}
    """Maps a network to the names of its blocks, which are sharded or recomputed one at a time.

    A network's blocks are the repeated modules in its containers by default. A block must be called as a module.
    """

    @classmethod
    def check(cls, settings: Any) -> None:
        """Raise UserError for settings that would fail later, such as a missing file.

        Training calls this method before the first stage.
        """

    def __init__(self, settings: Any, spec: DataSpec) -> None:
        """Store `settings` as `self.settings`; override this method to create the networks.

        Args:
            settings: An instance of `Settings`.
            spec: The properties of the data, such as channels, height, width and classes.
        """
        super().__init__()
        self.settings = settings

    def forward(self, phase: str, batch: Batch) -> Loss:
        """Return a phase's loss for one batch."""
        loss: Loss = getattr(self, f"{phase}_loss")(batch)
        return loss

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return per-sample tensors for the evaluator and for sample images.

        On a GPU, evaluations replay a captured call. As in the losses, the result must depend only on the batch, the
        parameters and the buffers: a Python value that changes during training would keep its first value.
        """
        raise NotImplementedError(f"{type(self).__name__} has no predict(), so it cannot be evaluated or sampled")

    def preview(self, batch: Batch) -> dict[str, Tensor]:
        """Return images by caption, to be shown side by side for each sample.

        The images are in [-1, 1] and have the same size. By default, no images are returned.
        """
        return {}

    def image_to_image(self, images: Tensor) -> dict[str, Tensor]:
        """Transform images of any size, and return the results by name.

        Inputs and results are in [-1, 1]. The main result is "image".
        """
        raise NotImplementedError(f"{type(self).__name__} has no image_to_image(), so it cannot be applied to images")

    def pretrained_weights(self, tensors: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """Return weights from another project under the recipe's tensor names.

        These are the tensors of an `--init-from` file without any of the recipe's names or, if `tensors` is None, the
        weights that the project published (see `Weights.published`). By default, there are none, which means that
        such files are not supported.
        """
        return {}

    @property
    def networks(self) -> dict[str, nn.Module]:
        """The trained networks by name, in the order of their first phase."""
        return {phase.network: self.get_submodule(phase.network) for phase in self.phases}


def single_networks(recipe: Recipe) -> dict[str, nn.Module]:
    """Return the trained networks by name; each network in an nn.ModuleDict is listed as GROUP.NAME."""
    networks: dict[str, nn.Module] = {}
    for name, network in recipe.networks.items():
        if isinstance(network, nn.ModuleDict):
            networks |= {f"{name}.{key}": member for key, member in network.items()}
        else:
            networks[name] = network
    return networks


def check_recipe(recipe: Recipe, name: str) -> None:
    """Raise UserError if an attribute has the wrong type, or a phase has no loss method or no network."""
    check_attributes(recipe, name)
    if not recipe.phases:
        raise UserError(f"recipe {name!r}: has no phases; define phases = (Phase(NAME, NETWORK),)")
    if recipe.evaluation.mode not in ("min", "max"):
        raise UserError(f"recipe {name!r}: evaluation has the mode {recipe.evaluation.mode!r}; use 'min' or 'max'")
    for phase in recipe.phases:
        method, has_own_forward = f"{phase.name}_loss", type(recipe).forward is not Recipe.forward
        if not has_own_forward and not callable(getattr(recipe, method, None)):
            others = [attribute for attribute in dir(type(recipe)) if attribute.endswith("_loss")]
            hint = f"; found: {', '.join(others)}" if others else ""
            raise UserError(f"recipe {name!r}: phase {phase.name!r} needs a method {method}(self, batch){hint}")
        if not has_own_forward:
            check_parameters(f"recipe {name!r}: {method}(self, batch)", getattr(recipe, method), {})
        if phase.network not in dict(recipe.named_modules()):
            children = [child for child, _ in recipe.named_children()]
            problem = unknown("network", phase.network, children)
            raise UserError(f"recipe {name!r}: phase {phase.name!r} refers to an {problem}")


# Attributes that are now fields of a record, with the attribute that holds the record.
MOVED = {
    **dict.fromkeys(("evaluator", "evaluated_on", "best", "conditions"), "evaluation = Evaluation(…)"),
    **dict.fromkeys(("importer", "from_weights", "must_match_weights", "has_row_per_class"), "weights = Weights(…)"),
    "scheduled": "signals = {NAME: function of the Clock}",
}


def check_attributes(recipe: Recipe | type[Recipe], name: str) -> None:
    """Raise UserError for an attribute that a recipe, or its class, declares with a value of the wrong type."""
    kinds: dict[type, Any] = {
        **{dict: Mapping, tuple: (tuple, list), str: str, type: type},
        **{Evaluation: Evaluation, Weights: Weights},
    }
    members = {"phases": Phase, "draws": Draw}
    for attribute, replacement in MOVED.items():
        if hasattr(recipe if isinstance(recipe, type) else type(recipe), attribute):
            raise UserError(f"recipe {name!r}: {attribute} = …: not read; declare {replacement}")
    for attribute, default in vars(Recipe).items():
        if attribute.startswith("_") or type(default) not in kinds:
            continue
        value = getattr(recipe, attribute)
        if isinstance(value, property):
            continue
        kind = (
            f"{type(default).__name__}(…)" if type(default) in (Evaluation, Weights) else f"a {type(default).__name__}"
        )
        problem = "" if isinstance(value, kinds[type(default)]) else f"expected {kind}"
        if not problem and attribute in members:
            values, member = value.values() if isinstance(value, Mapping) else value, members[attribute]
            problem = "" if all(isinstance(part, member) for part in values) else f"expected only {member.__name__}(…)"
        if problem:
            raise UserError(f"recipe {name!r}: {attribute} = {str(value)[:80]}: {problem}; correct the declaration")
