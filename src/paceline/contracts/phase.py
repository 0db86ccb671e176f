"""The components of a recipe: phases, their losses and their random inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from torch import Tensor

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


class Draw(NamedTuple):
    """A random input that the engine generates for each sample and adds to the batch.

    Its values depend only on the seed, the number of images seen and the name of the draw.

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
    """The position in training from which scheduled values are computed.

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


class Best(NamedTuple):
    """The metric that selects the best checkpoint.

    Attributes:
        metric: SPLIT/NAME. Omit the [label] that some metric names end with. If empty, the last checkpoint is the best.
        mode: Whether a smaller ("min") or a larger ("max") value is better.

    Examples:
        >>> paceline.Best("validation/top1", mode="max")
        Best(metric='validation/top1', mode='max')
    """

    metric: str = ""
    mode: Literal["min", "max"] = "max"
