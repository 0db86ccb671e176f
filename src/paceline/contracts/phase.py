"""The components of a recipe: phases, their losses and random inputs, and how the recipe is evaluated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor

from paceline.core.text import short_repr

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
