"""The blocks of a network: the repeated parts that can be sharded or recomputed one at a time."""

from __future__ import annotations

from collections import Counter

from torch import nn

from paceline.contracts.recipe import Recipe
from paceline.core.errors import UserError

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def blocks_of(recipe: Recipe, name: str) -> list[nn.Module]:
    """Return the blocks of one of the recipe's networks in the order of definition, each only once.

    `name` is a key of `recipe.single_networks`. The recipe can list the blocks. By default, they are the largest
    modules that occur several times in a container.
    """
    network = recipe.single_networks[name]
    listed = recipe.blocks.get(name, recipe.blocks.get(name.partition(".")[0]))
    found = _repeated(network) if listed is None else [_named(network, name, path) for path in listed]
    return list(dict.fromkeys(found))


def _named(network: nn.Module, name: str, path: str) -> nn.Module:
    modules = dict(network.named_modules())
    if path not in modules or not path:
        raise UserError(f"blocks: network {name!r} has no module {path!r}: list names from its named_modules()")
    return modules[path]


def _repeated(module: nn.Module) -> list[nn.Module]:
    """Return the largest modules with submodules that are used like their siblings: same container, same class."""
    found: list[nn.Module] = []
    kinds = Counter(type(child) for child in module._modules.values())  # counts a module that is used twice as two
    for child in module.children():
        inner = _repeated(child)
        is_repeated = isinstance(module, CONTAINERS) and kinds[type(child)] > 1
        # A stage of a network, such as a ResNet's, is a container that repeats like a block but consists of blocks.
        is_stage = isinstance(child, CONTAINERS) and bool(inner)
        callable_alone = not isinstance(child, (nn.ModuleList, nn.ModuleDict))
        if is_repeated and not is_stage and callable_alone and _is_worthwhile(child):
            found.append(child)
        else:
            found += inner
    return found


def _is_worthwhile(module: nn.Module) -> bool:
    """Return whether a module has both submodules and parameters. A single layer is too small for a block."""
    return any(True for _ in module.children()) and any(True for _ in module.parameters())
