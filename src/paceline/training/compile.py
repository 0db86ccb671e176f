"""`--compile`: compile each of the recipe's networks with torch.compile, inside the strategy's wrapper.

Modules are compiled in place, so parameter names in checkpoints do not change. Compilation is tried on one batch before
training starts. If it fails, one line reports why and all networks stay eager.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import nn

from paceline.contracts.recipe import Recipe
from paceline.data.feed import StepData
from paceline.parallel.torch_internals import compiled_call, undo_compile
from paceline.training.step import Step


def compile_networks(recipe: Recipe) -> list[nn.Module]:
    """Compile networks lazily, except those that need a double backward; return the compiled ones."""
    single = recipe.single_networks.items()
    networks = [network for name, network in single if name.partition(".")[0] not in recipe.double_backward]
    for network in networks:
        network.compile(dynamic=False)
    return networks


def try_compile(step: Step, data: StepData) -> str:
    """Compile the networks and test every phase on one step's data, leaving the weights unchanged; return a note."""
    if step.strategy.cannot_compile:
        return f"compile: off, since {step.strategy.cannot_compile}"
    if step.strategy.recomputes:
        return "compile: off, since activations are recomputed (checkpoint_activations)"
    networks = compile_networks(step.recipe)
    if not networks:
        return "compile: off, since every network needs a double backward (R1)"
    buffers = {name: buffer.clone() for name, buffer in step.recipe.named_buffers()}
    try:
        step.dry_run(data.fetched[0][0])
        outcome = f"compile: on for {len(networks)} of {len(step.recipe.single_networks)} networks"
    except Exception as error:  # a compiler may raise any exception; training continues without it
        for network in networks:
            undo_compile(network)
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        outcome = f"compile: off, since it failed ({type(error).__name__}: {reason})"
    with torch.no_grad():
        for name, buffer in step.recipe.named_buffers():
            buffer.copy_(buffers[name])
    return outcome


def is_compiled(network: nn.Module) -> bool:
    """Return whether a network is compiled."""
    return compiled_call(network) is not None


def eager() -> AbstractContextManager[object]:
    """Return a context in which compiled networks run eagerly, because evaluation images come in many sizes."""
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance
