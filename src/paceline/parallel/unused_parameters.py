"""Report a step whose loss does not use every parameter, which DistributedDataParallel does not support."""

from __future__ import annotations

from torch import nn

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Phase
from paceline.core.errors import UserError
from paceline.parallel.torch_internals import has_exchanged_gradients


def check_gradients(
    wrapper: nn.parallel.DistributedDataParallel, phase: Phase, settings: RunSettings, rank: int
) -> None:
    """Raise UserError if the last backward pass, which was that of `phase`, left out parameters."""
    if has_exchanged_gradients(wrapper):
        return
    loss_name = "the loss of the last micro-batch" if settings.accumulate > 1 else "the loss"
    raise UserError(
        f"phase {phase.name!r}: in the previous step, {loss_name} on rank {rank} did not use every "
        f"parameter of {phase.network!r}, so some gradients were not exchanged: use every parameter in "
        f"{loss_name}, with a weight of 0 where necessary"
    )
