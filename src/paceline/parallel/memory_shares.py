"""How a strategy divides memory among devices, for the memory forecast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class MemoryShares:
    """The memory of the fullest device, compared with one device that trains on the same number of samples.

    A strategy that divides nothing and needs no buffers returns `MemoryShares()`.
    """

    held: Mapping[str, float] = field(default_factory=dict)
    """Fraction of a network's weights, gradients, optimizer state and EMA per device; 1 for networks not listed."""
    gradient_copies: float = 1.0
    """How many copies of a phase's gradients the device stores, apart from buffers."""
    batch_copies: int = 1
    """How many devices' batches the device stores."""
    buffer_bytes: int = 0
    """Memory that the strategy keeps during the whole step: gradient buckets and gathered weights."""

    def of(self, network: str) -> float:
        """Return the fraction of a network that a device stores."""
        return self.held.get(network, 1.0)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the size of tensors in bytes, counting each tensor once."""
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())
