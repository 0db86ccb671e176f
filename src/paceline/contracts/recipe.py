"""The base class for recipes, which define the networks, the training phases and their losses.

A recipe contains no code for devices, processes, precision, optimizer steps or files. The engine calls
`forward(phase, batch)`, the single entry point that autocast, DataParallel, DistributedDataParallel and
Lightning wrap, and updates the networks that the phases refer to.

This module also defines `Phase`, `Loss` and the other names that a recipe file needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor, nn

from paceline.contracts.data_spec import DataSpec as DataSpec
from paceline.core.errors import UserError, check_parameters, unknown
from paceline.core.text import short_repr
from paceline.core.types import SettingValues

Batch = dict[str, Tensor]
"""Tensors by name, such as "image" and "label"; dimension 0 is the batch dimension.

Losses and `predict` receive images as floats in [-1, 1].

Examples:
    >>> import torch
    >>> batch: paceline.Batch = {"image": torch.zeros(16, 1, 8, 8), "label": torch.zeros(16, dtype=torch.int64)}
    >>> {name: list(tensor.shape) for name, tensor in batch.items()}
    {'image': [16, 1, 8, 8], 'label': [16]}
"""


class Loss(NamedTuple):
    """The result of one phase for one batch.

    Attributes:
        terms: Loss terms by name, each a weighted mean over samples. The engine logs each term and minimises their sum.
        shared: Tensors with one row per sample. They are detached and added to the batch for later phases in this step.
        signals: Scalars passed to later phases, averaged across micro-batches, replicas and ranks.

    Examples:
        >>> import torch
        >>> paceline.Loss({"adversarial": torch.tensor(0.6931)}, shared={"fake": torch.zeros(16, 1, 8, 8)})
        Loss(terms={'adversarial': 0.6931}, shared={'fake': [16, 1, 8, 8]})
    """

    terms: dict[str, Tensor]
    shared: dict[str, Tensor] = {}
    signals: dict[str, Tensor] = {}

    def __repr__(self) -> str:
        groups = {name: group for name, group in self._asdict().items() if group or name == "terms"}
        return f"Loss({', '.join(f'{name}={_short(group)}' for name, group in groups.items())})"


def _short(tensors: Mapping[str, Tensor]) -> str:
    """Format scalars as values and other tensors as shapes."""
    shown = {
        name: f"{tensor.item():.4g}" if tensor.ndim == 0 else str(list(tensor.shape))
        for name, tensor in tensors.items()
    }
    return f"{{{', '.join(f'{name!r}: {text}' for name, text in shown.items())}}}"


class Phase(NamedTuple):
    """The update of one network with one loss.

    A training step runs its phases in order.

    Attributes:
        name: The name of the phase. The recipe's method `<name>_loss` returns its loss.
        network: The name of the submodule that the phase updates. Several phases can update the same network.
        every: Run the phase only at every nth step, for lazy regularisation.
        repeat: How many times to run the phase per step, each time with new data, for example for a critic. Tensors
            shared by earlier phases are available only the first time.
        concurrent: Whether the phase is independent of the previous one, so that both can run at the same time.

    Examples:
        >>> phases = (
        ...     paceline.Phase("generator", network="generator"),
        ...     paceline.Phase("discriminator", network="discriminator"),
        ...     paceline.Phase("penalty", network="discriminator", every=16),  # its loss is `penalty_loss`
        ... )
    """

    name: str
    network: str
    every: int = 1
    repeat: int = 1
    concurrent: bool = False


CLASS_DRAW = "class"


class Draw(NamedTuple):
    """A random input that the engine generates for each sample and adds to the batch.

    Its values depend only on the seed, the number of images seen and the name of the draw. A class-conditional
    generator names the uniform draw u that selects class ⌊u · num_classes⌋ "class".

    Attributes:
        shape: The shape for one sample.
        kind: The distribution: "normal", or "uniform" in [0, 1).
        common: Whether the whole global batch shares one row, for a random choice that is the same on every device.

    Examples:
        With these draws, the losses and `predict` receive `batch["noise"]`, an [n, 100] tensor, and `batch["coin"]`:

        >>> draws = {"noise": paceline.Draw((100,)), "coin": paceline.Draw((), "uniform", common=True)}
    """

    shape: tuple[int, ...]
    kind: str = "normal"
    common: bool = False


class Clock(NamedTuple):
    """The position in training, from which a recipe's scheduled signals are computed.

    Attributes:
        images: The number of images seen before this step.
        images_per_step: The number of images in a step, across all devices.
        burn_in: The length of the burn-in in images, from the setting `burn_in`; 0 if there is none.

    Examples:
        >>> clock = paceline.Clock(images=500, images_per_step=64, burn_in=1000)
        >>> round(clock.anneal(initial=4.0, final=2.0), 6)
        3.0
    """

    images: int
    images_per_step: int
    burn_in: int = 0

    def anneal(self, initial: float, final: float) -> float:
        """Return a value on a half-cosine curve from `initial` to `final`.

        The final value is reached at the end of the burn-in, and is constant afterwards.
        """
        if self.images >= self.burn_in:
            return final
        return final + (initial - final) * 0.5 * (1 + math.cos(math.pi * self.images / self.burn_in))


@dataclass(frozen=True)
class Evaluation:
    """How a recipe is evaluated during training.

    Attributes:
        evaluator: The evaluator that computes metrics from `predict`: a name, or the path to a file; empty for none.
        best: The metric that selects the best checkpoint: SPLIT/NAME, without the [label] that some metric names end
            with. If empty, the last checkpoint is the best.
        mode: Whether a smaller ("min") or a larger ("max") value of `best` is better.
        split: The split that is evaluated.
        conditions: Settings that change the images on which the recipe is evaluated, such as those of a degradation,
            by name. Metrics measured under different conditions are not compared.

    Examples:
        >>> paceline.Evaluation("accuracy", best="validation/top1")
        Evaluation(evaluator='accuracy', best='validation/top1')
    """

    evaluator: str = ""
    best: str = ""
    mode: Literal["min", "max"] = "max"
    split: str = "validation"
    conditions: Mapping[str, str | int | float] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        return short_repr(self)


@dataclass(frozen=True)
class Weights:
    """Weights from elsewhere that a recipe can start from.

    Attributes:
        importer: The importer for weight files from other projects: a name, or the path to a file; empty for none.
        network_settings: Settings that a run takes from its `--init-from` weights if they contain a network from
            another library. The first is the name of the network. Settings from the user take precedence.
        must_match: Settings that must have the same values as in the `--init-from` run, even if its weights fit either
            way.
        row_per_class: Whether the last layer has one row per class. It is new if the weights have more or fewer.
        published: Whether a new run starts from the weights that `Recipe.pretrained_weights` returns, unless
            `--init-from` is set.

    Examples:
        >>> weights = paceline.Weights(must_match=("activation",))
    """

    importer: str = ""
    network_settings: tuple[str, ...] = ()
    must_match: tuple[str, ...] = ()
    row_per_class: bool = False
    published: bool = False

    def settings_to_match(self, settings: Any) -> tuple[str, ...]:
        """Return the settings that must match the weights.

        For a network from another library, these are only the settings that are also taken from the weights.
        """
        if self.network_settings and ":" in getattr(settings, self.network_settings[0]):
            return tuple(name for name in self.must_match if name in self.network_settings)
        return self.must_match


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


def check_attributes(recipe: Recipe | type[Recipe], name: str) -> None:
    """Raise UserError for an attribute that a recipe, or its class, declares with a value of the wrong type."""
    kinds: dict[type, tuple[type, ...]] = {dict: (Mapping,), tuple: (tuple, list)}
    members = {"phases": Phase, "draws": Draw}
    for attribute, default in vars(Recipe).items():
        kind = type(default)
        if attribute.startswith("_") or kind not in (dict, tuple, str, type, Evaluation, Weights):
            continue
        value, problem = getattr(recipe, attribute), ""
        if isinstance(value, property):
            continue
        if not isinstance(value, kinds.get(kind, (kind,))):
            problem = f"expected {kind.__name__}(…)" if kind in (Evaluation, Weights) else f"expected a {kind.__name__}"
        elif attribute in members:
            values, member = value.values() if isinstance(value, Mapping) else value, members[attribute]
            problem = "" if all(isinstance(part, member) for part in values) else f"expected only {member.__name__}(…)"
        if problem:
            raise UserError(f"recipe {name!r}: {attribute} = {str(value)[:80]}: {problem}; correct the declaration")
