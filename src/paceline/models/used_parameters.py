"""Finds the parameters that affect a network's output. Data-parallel training expects a gradient for each of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def used_parameters(network: nn.Module, size: tuple[int, int, int, int]) -> set[str]:
    """Return the names of the parameters that the output for images of this size depends on."""
    try:
        return _used(network, size, torch.device("meta"))  # computes shapes only, which takes little time
    except Exception:  # a network may not support tensors without data
        with torch.random.fork_rng(devices=[]):
            return _used(network, size, torch.device("cpu"))


def _used(network: nn.Module, size: tuple[int, int, int, int], device: torch.device) -> set[str]:
    named = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    moved = {
        # A copy, because normalisation layers update their statistics.
        name: tensor.detach().to(device, copy=True).requires_grad_(isinstance(tensor, nn.Parameter))
        for name, tensor in named.items()
    }
    was_training = network.training
    network.train()
    try:
        with torch.enable_grad(), device:
            result = torch.func.functional_call(network, moved, (torch.zeros(size, device=device),))
    finally:
        network.train(was_training)
    reached = _leaves(result)
    return {name for name, tensor in moved.items() if id(tensor) in reached}


def _leaves(result: Tensor) -> set[int]:
    """Return the id() of each leaf tensor in the graph of a result."""
    leaves, seen, waiting = set[int](), set[object](), [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        waiting += [before for before, _ in node.next_functions]
    return leaves
