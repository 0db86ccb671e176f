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
from paceline.contracts.phase import Batch, Best, Clock, Draw, Loss, Phase
from paceline.core.errors import UserError, check_parameters, unknown
from paceline.core.types import SettingValues

__all__ = ["Batch", "Best", "Clock", "DataSpec", "Draw", "Loss", "NoSettings", "Phase", "Recipe"]


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
    """A frozen dataclass. Each field is a setting: `--set name=value`."""
    defaults: ClassVar[SettingValues] = {}
    """Default values for run settings, such as the batch size and the learning rate."""
    presets: ClassVar[Mapping[str, SettingValues]] = {}
    """Named sets of settings: `--preset NAME`."""
    small: ClassVar[SettingValues] = {}
    """Settings that make a training step cheap, used by `verify` and the self-tests."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """Maps setting names that other programs use in `--config` files to Paceline's names, or to "" to ignore them."""
    other_names: ClassVar[Mapping[str, str]] = {}
    """Maps setting names from other projects to advice on what to use instead, shown for an unknown setting."""
    must_match_weights: ClassVar[tuple[str, ...]] = ()
    """Settings that must have the same values as in the `--init-from` run, even if its weights fit either way."""
    has_row_per_class: ClassVar[bool] = False
    """Whether the last layer has one row per class. It is new if `--init-from` weights have more or fewer."""
    from_weights: ClassVar[tuple[str, ...]] = ()
    """Settings that a run takes from its `--init-from` weights if they contain a network from another library.

    The first is the name of the network. Settings from the user take precedence.
    """
    stages: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Maps each value of the `stage` setting that stands for several stages to the names of those stages."""

    # Data
    required_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that every sample must have."""
    rejected_fields: ClassVar[Mapping[str, str]] = {}
    """Maps sample fields that the recipe does not use, and therefore rejects, to a recipe that uses them."""
    importer: ClassVar[str] = ""
    """The importer for weight files from other projects: a name, or the path to a file."""

    # Evaluation
    evaluator: ClassVar[str] = ""
    """The evaluator that computes metrics from `predict`: a name, or the path to a file."""
    evaluated_on: ClassVar[str] = "validation"
    """The split that is evaluated during training."""
    best: Best = Best()
    """The metric that selects the best checkpoint, and whether smaller or larger values are better."""
    generates: ClassVar[bool] = False
    """Whether `predict` generates an "image" with values in [-1, 1] from random inputs (`draws`) alone."""
    output_scale: int = 1
    """The scale factor of `image_to_image`: output height and width relative to the input."""
    conditions: Mapping[str, str | int | float] = {}
    """Settings that change the images on which the recipe is evaluated, such as those of a degradation, by name.

    They are part of the evaluation protocol, so metrics measured under different conditions are not compared.
    """
    window_px: tuple[int, int] | None = None
    """Height and width of the network's training input, if larger images must be processed in windows of that size.

    `apply` divides images into windows before it calls `image_to_image`. `predict` must do so itself.
    """

    # Training
    phases: tuple[Phase, ...] = ()
    """The phases of a step, in order."""
    draws: dict[str, Draw] = {}
    """Random inputs that the losses and `predict` read from the batch."""
    class_draw: str = ""
    """For a class-conditional generator: the uniform draw u that selects class ⌊u · num_classes⌋."""
    signals: dict[str, float] = {}
    """Scalars that a phase passes to later phases as fields of the batch, with their initial values."""
    scheduled: Mapping[str, Callable[[Clock], float]] = {}
    """Scalars that the losses read from the batch, computed before each step from the number of images seen."""
    must_vary: tuple[str, ...] = ()
    """Loss terms or signals (PHASE/NAME) that are zero only if a network has collapsed.

    Training stops with an error if one of them is zero for a whole log interval, or in the last step before a
    checkpoint is saved.
    """
    diverged_above: float = 1e8
    """Training stops with an error if the magnitude of a loss or signal exceeds this in any step."""
    ema: tuple[str, ...] = ()
    """Networks whose EMA weights are used for evaluation.

    If they contain BatchNorm layers, `predict` is also called with training samples, to recompute the statistics.
    """
    starts_from_published: bool = False
    """Whether a new run starts from the weights that `published_weights` returns, unless `--init-from` is set."""
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

    def check_phases(self, name: str) -> None:
        """Raise UserError if a phase has no loss method or no network.

        `name` is the name of the recipe in the error message.
        """
        check_attributes(self, name)
        if not self.phases:
            raise UserError(f"recipe {name!r}: has no phases; define phases = (Phase(NAME, NETWORK),)")
        _, mode = self.best
        if mode not in ("min", "max"):
            raise UserError(f"recipe {name!r}: best has the mode {mode!r}; use 'min' or 'max'")
        for phase in self.phases:
            method, has_own_forward = f"{phase.name}_loss", type(self).forward is not Recipe.forward
            if not has_own_forward and not callable(getattr(self, method, None)):
                others = [attribute for attribute in dir(type(self)) if attribute.endswith("_loss")]
                hint = f"; found: {', '.join(others)}" if others else ""
                raise UserError(f"recipe {name!r}: phase {phase.name!r} needs a method {method}(self, batch){hint}")
            if not has_own_forward:
                check_parameters(f"recipe {name!r}: {method}(self, batch)", getattr(self, method), {})
            if phase.network not in dict(self.named_modules()):
                children = [child for child, _ in self.named_children()]
                problem = unknown("network", phase.network, children)
                raise UserError(f"recipe {name!r}: phase {phase.name!r} refers to an {problem}")

    def published_weights(self) -> dict[str, Tensor]:
        """Return weights that another project published, by tensor name.

        The weights may have to be downloaded. Training calls this method for a new run if
        `starts_from_published` is true.
        """
        raise NotImplementedError(f"{type(self).__name__} has no published_weights()")

    @classmethod
    def settings_of_weights(cls, settings: Any) -> tuple[str, ...]:
        """Return the settings that must match the weights of a network.

        By default, these are all settings in `must_match_weights`. Override this method to leave out those that do not
        affect the network chosen by `settings`.
        """
        return cls.must_match_weights

    def adopt_weights(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert the tensors in another project's file to the recipe's tensor names.

        Training calls this method for an `--init-from` file without any of the recipe's names. By default, it returns
        no tensors, which means that such files are not supported.
        """
        return {}

    @property
    def networks(self) -> dict[str, nn.Module]:
        """The trained networks by name, in the order of their first phase."""
        return {phase.network: self.get_submodule(phase.network) for phase in self.phases}

    @property
    def single_networks(self) -> dict[str, nn.Module]:
        """The trained networks by name.

        Each network in an nn.ModuleDict is listed as GROUP.NAME.
        """
        found: dict[str, nn.Module] = {}
        for name, network in self.networks.items():
            if isinstance(network, nn.ModuleDict):
                found |= {f"{name}.{key}": member for key, member in network.items()}
            else:
                found[name] = network
        return found


def check_attributes(recipe: Recipe | type[Recipe], name: str) -> None:
    """Raise UserError for an attribute that a recipe, or its class, declares with a value of the wrong type."""
    kinds: dict[type, Any] = {dict: Mapping, tuple: (tuple, list), str: str, Best: tuple, type: type}
    members = {"phases": Phase, "draws": Draw}
    for attribute, default in vars(Recipe).items():
        if attribute.startswith("_") or type(default) not in kinds:
            continue
        value = getattr(recipe, attribute)
        if isinstance(value, property):
            continue
        problem = "" if isinstance(value, kinds[type(default)]) else f"expected a {type(default).__name__}"
        if not problem and attribute in members:
            values, member = value.values() if isinstance(value, Mapping) else value, members[attribute]
            problem = "" if all(isinstance(part, member) for part in values) else f"expected only {member.__name__}(…)"
        if problem:
            raise UserError(f"recipe {name!r}: {attribute} = {str(value)[:80]}: {problem}; correct the declaration")
