"""What a recipe is made of: phases, the losses that they compute, and the random numbers that they read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from torch import Tensor

Batch = dict[str, Tensor]
"""Tensors by name, such as "image" and "label"; dimension 0 of every tensor is the sample.

Losses and `predict` get images as floats in [-1, 1].

Examples:
    >>> import torch
    >>> batch: paceline.Batch = {"image": torch.zeros(16, 1, 8, 8), "label": torch.zeros(16, dtype=torch.int64)}
    >>> {name: list(tensor.shape) for name, tensor in batch.items()}
    {'image': [16, 1, 8, 8], 'label': [16]}
"""


class Loss(NamedTuple):
    """What one phase computes from one batch.

    Attributes:
        terms: Weighted means over samples, by name; the engine sums and logs them.
        shared: Tensors with a row per sample, added to the batch of later phases of this step, detached.
        signals: Scalars for later phases, averaged over micro-batches, replicas and ranks.

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
    """Return scalars with their values, other tensors with their shapes."""
    shown = {
        name: f"{tensor.item():.4g}" if tensor.ndim == 0 else str(list(tensor.shape))
        for name, tensor in tensors.items()
    }
    return f"{{{', '.join(f'{name!r}: {text}' for name, text in shown.items())}}}"


class Phase(NamedTuple):
    """One network updated by its own loss; a step runs the phases in order.

    Attributes:
        name: The phase's name; its loss is the recipe's method `<name>_loss`.
        network: The submodule that it updates; several phases may name the same one.
        every: Run at every nth step, for lazy regularisation.
        repeat: Times per step, each with new data, for critics; only the first sees what earlier phases shared.
        concurrent: Whether it is independent of the phase before it: both may run at the same time.

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
    """Random numbers per sample that the engine adds to the batch.

    They are a function of the seed, the images seen and the draw's name.

    Attributes:
        shape: The shape of one sample's numbers.
        kind: "normal", or "uniform" in [0, 1).
        common: One row for the whole global batch: a choice that is the same on every device.

    Examples:
        A recipe with these draws finds `batch["noise"]`, [n, 100], in its losses and in `predict`:

        >>> draws = {"noise": paceline.Draw((100,)), "coin": paceline.Draw((), "uniform", common=True)}
    """

    shape: tuple[int, ...]
    kind: str = "normal"
    common: bool = False


class Best(NamedTuple):
    """The metric that chooses the best checkpoint.

    Attributes:
        metric: SPLIT/NAME, without what the name has in [brackets]; "": the last checkpoint counts.
        mode: Whether a smaller ("min") or a larger ("max") value is better.

    Examples:
        >>> paceline.Best("validation/top1", mode="max")
        Best(metric='validation/top1', mode='max')
    """

    metric: str = ""
    mode: Literal["min", "max"] = "max"
