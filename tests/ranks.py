"""Functions that multi-process tests run in each rank, such as training and recording a few steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.commands.configure import configure
from paceline.config.resolve import Config
from paceline.training.build import Parts, assemble
from paceline.training.evaluate import SplitEvaluator
from paceline.training.loop import check_replicas

Mailbox = dict[str, np.ndarray]


def make_parts(recipe: str, **settings: Any) -> Parts:
    """Assemble a float64 run on the CPU."""
    return assemble(make_config(recipe, **settings))


def make_config(recipe: str, **settings: Any) -> Config:
    """Return the settings of a float64 run on the CPU."""
    return configure(recipe, {"precision": "fp64", "accelerator": "cpu"} | settings)


def run_steps(parts: Parts, number: int) -> None:
    """Train for the given number of steps."""
    parts.recipe.train()
    steps = parts.feed.steps(0, number * parts.feed.images_per_step)
    parts.strategy.drive(steps, lambda data: parts.step(data) and None)


def weights(parts: Parts) -> dict[str, torch.Tensor]:
    """Return the networks' floating-point tensors."""
    return {name: value for name, value in parts.recipe.state_dict().items() if value.is_floating_point()}


def difference(first: dict[str, Any], second: dict[str, Any]) -> float:
    """Return the largest difference between two sets of tensors, relative to the largest value."""
    assert first.keys() == second.keys()
    largest = max(float(abs(value).max()) for value in first.values())
    return max(float(abs(first[name] - second[name]).max()) for name in first) / largest


def note_steps(path: str, recipe: str, steps: int, settings: dict[str, Any]) -> None:
    """Train and evaluate; write the inputs of every phase, the weights and the results to PATH-RANK.npz."""
    parts = make_parts(recipe, **settings)
    parts.recipe.watched = True
    run_steps(parts, steps)
    notes: Mailbox = {f"weights/{name}": value.numpy() for name, value in weights(parts).items()}
    notes |= {f"signals/{name}": value.numpy() for name, value in parts.step.signals.items()}
    for number, (phase, batch) in enumerate(parts.recipe.seen):
        for name in ("index", "noise", "mix", "gap", "level", "real"):
            if name in batch:
                notes[f"{number:03d}/{phase}/{name}"] = batch[name].detach().numpy()
    parts.recipe.seen.clear()
    loader, world = parts.loaders["validation"], parts.world
    results = SplitEvaluator(parts.recipe, loader, "validation", world, parts.precision, parts.config.run).measure()
    notes |= {f"results/{name}": np.array(value) for name, value in results.items()}
    notes["evaluated"] = np.concatenate([batch["index"].numpy() for _, batch in parts.recipe.seen])
    np.savez(Path(f"{path}-{parts.world.rank}.npz"), **notes)
    parts.world.wait_for_all()
    parts.world.leave()


def spoil_and_check(recipe: str, spoiled: str, settings: dict[str, Any]) -> None:
    """Check that all ranks have equal weights, then change one on the last rank and print the error that follows."""
    parts = make_parts(recipe, **settings)
    check_replicas(parts.recipe, parts.world)
    run_steps(parts, 2)
    check_replicas(parts.recipe, parts.world)
    if parts.world.rank == parts.world.size - 1:
        with torch.no_grad():
            next(parts.recipe.get_submodule(spoiled).parameters()).view(-1)[0].add_(1e-12)
    try:
        check_replicas(parts.recipe, parts.world)
    except RuntimeError as error:
        print(error)
    parts.world.wait_for_all()
    parts.world.leave()
