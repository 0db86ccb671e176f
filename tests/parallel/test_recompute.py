"""Recomputing activations in the backward pass changes neither weights nor buffers, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import make_config, run_steps
from torch import nn

from paceline.contracts.recipe import DataSpec, Recipe
from paceline.core.errors import UserError
from paceline.parallel.shards import blocks_of
from paceline.parallel.strategies.dp import DataParallel
from paceline.training.build import assemble

BLOCKY = str(Path(__file__).parents[1] / "blocky.py")


def train(recompute_activations: str) -> tuple[dict[str, torch.Tensor], int]:
    """Train for a few steps; return all weights and buffers, and the number of forward passes of blocks."""
    parts = assemble(make_config(BLOCKY, checkpoint_activations=recompute_activations))
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    for block in parts.recipe.classifier[1]:
        block.conv.register_forward_hook(count)
    torch.manual_seed(1)  # seeds dropout
    run_steps(parts, 3)
    return dict(parts.recipe.state_dict()), calls


def test_recomputed_blocks_with_batchnorm_dropout_and_spectral_norm_train_to_the_same_bits() -> None:
    (stored, calls), (recomputed, calls_when_recomputed) = (train(value) for value in ("off", "on"))
    assert calls == 4 * 3 and calls_when_recomputed == 2 * calls
    assert [name for name in stored if not torch.equal(stored[name], recomputed[name])] == []
    assert stored["classifier.1.0.norm.num_batches_tracked"].item() == 3


def test_a_network_without_blocks_is_rejected_and_auto_is_off_for_one_device(tiny: str) -> None:
    with pytest.raises(UserError, match="no network has repeated blocks"):
        assemble(make_config(tiny, checkpoint_activations="on"))
    assert not assemble(make_config(BLOCKY)).strategy.recomputes


def test_data_parallel_and_cuda_graphs_and_compilation_report_why_they_cannot_recompute() -> None:
    with pytest.raises(UserError, match=r"checkpoint_activations=on: DataParallel copies .*; use checkpoint_acti"):
        assemble(make_config(BLOCKY, checkpoint_activations="on", strategy="dp"))
    assert DataParallel.why_not("recompute")
    parts = assemble(make_config(BLOCKY, checkpoint_activations="on", compile=True))
    assert "compile: off, since activations are recomputed (checkpoint_activations)" in parts.notes


class Stages(Recipe):
    """A recipe with a network whose stages consist of blocks, and a head."""

    def __init__(self) -> None:
        super().__init__(None, DataSpec(1, 8, 8))
        stage = [nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2))) for _ in range(2)]
        self.network = nn.Module()
        self.network.body, self.network.head = nn.ModuleList(stage), nn.Linear(2, 2)
        self.tied = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.ReLU())] * 3)

    @property
    def networks(self) -> dict[str, nn.Module]:
        return {"network": self.network, "tied": self.tied}


def test_blocks_are_the_largest_repeated_modules_that_are_not_stages() -> None:
    recipe = Stages()
    stages = recipe.network.body
    assert blocks_of(recipe, "network") == [stages[0][0], stages[0][1], stages[1][0], stages[1][1]]
    assert blocks_of(recipe, "tied") == [recipe.tied[0]], "a block that is used three times is listed once"


def test_a_recipe_can_list_its_blocks() -> None:
    recipe = Stages()
    recipe.blocks = {"network": ("body.1", "head")}
    assert blocks_of(recipe, "network") == [recipe.network.body[1], recipe.network.head]
