"""Clipping and overflow handling for sharded gradients, of which each process has some rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.parallel.exchange import sum_over_processes


def clip_rows(rows: Sequence[Tensor], maximum: float) -> None:
    """Scale the gradients so that their norm across all processes is at most `maximum`."""
    gradients = _gradients(rows)
    own = nn.utils.get_total_norm(gradients) if gradients else rows[0].new_zeros(())  # a process may have no rows
    nn.utils.clip_grads_with_norm_(rows, maximum, sum_over_processes(own.square().reshape(1))[0].sqrt())


def spread_overflow(rows: Sequence[Tensor]) -> None:
    """Make a gradient infinite in every process if any process has a gradient that is not finite.

    Each process's GradScaler then skips the same steps. The values stay on the device, so the host does not wait.
    """
    gradients = _gradients(rows)
    overflow = torch.stack([~gradient.isfinite().all() for gradient in gradients]).any()
    num_processes = sum_over_processes(overflow.float().reshape(1))[0]
    gradients[0].add_(torch.where(num_processes > 0, torch.inf, 0.0))


def _gradients(rows: Sequence[Tensor]) -> list[Tensor]:
    return [own.grad for own in rows if own.grad is not None and own.numel()]
