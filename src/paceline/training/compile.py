"""`--compile`: the recipe's networks through torch.compile, each by itself, inside whatever wraps the recipe.

A module is compiled in place, so no name in a checkpoint changes. Whether all of it compiles is tried on one batch
before training begins; where it does not, one line says why and everything stays eager.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import nn

from paceline.contracts.recipe import Recipe
from paceline.data.feed import StepData
from paceline.parallel.torch_internals import undo_compile
from paceline.training.step import Step


def compile_networks(recipe: Recipe) -> list[nn.Module]:
    """Has each network compiled when it is first called, but for those whose gradient is differentiated again."""
    single = recipe.single_networks.items()
    networks = [network for name, network in single if name.partition(".")[0] not in recipe.double_backward]
    for network in networks:
        network.compile(dynamic=False)
    return networks


def try_compiled(step: Step, data: StepData) -> str:
    """Compiles the networks and tries every phase on one step's data; says what came of it. Nothing is learned."""
    if step.strategy.cannot_compile:
        return f"compile: off, since {step.strategy.cannot_compile}"
    networks = compile_networks(step.recipe)
    if not networks:
        return "compile: off, since every network's gradient is differentiated again (R1)"
    buffers = {name: buffer.clone() for name, buffer in step.recipe.named_buffers()}
    try:
        step.rehearse(data.fetched[0][0])
        outcome = f"compile: {len(networks)} of {len(step.recipe.single_networks)} networks"
    except Exception as error:  # whatever a compiler may raise: it is never a reason not to train
        for network in networks:
            undo_compile(network)
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        outcome = f"compile: off, since {type(error).__name__}: {reason}"
    with torch.no_grad():
        for name, buffer in step.recipe.named_buffers():
            buffer.copy_(buffers[name])
    return outcome


def eager() -> AbstractContextManager[object]:
    """Run compiled networks as they are written inside: evaluation has images of many sizes."""
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance
