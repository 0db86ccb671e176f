"""Networks that are divided among the processes train like networks in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
from running import start_function_in_ranks
from sharded import Case, overflow_once, print_cast_caching, print_errors, trace_all
from torch import nn

from paceline.commands.verify import compare
from paceline.contracts.recipe import DataSpec, Phase, Recipe
from paceline.core.errors import UserError
from paceline.parallel.shards import blocks_of

TESTS = Path(__file__).parents[1]
STEPS = 3
# A gradient penalty, clipping, several discriminators with accumulation, and shared parameters and modules.
CASES: dict[str, Case] = {
    "penalty": (str(TESTS / "duet.py"), {"norm": "none"}),
    "classification": ("classification", {"clip": 0.5, "batch_size": "12"}),
    "dual_gan": ("dual_gan", {"batch_size": "12", "accumulate": 2}),
    "tied": (str(TESTS / "tied.py"), {}),
    "shared_modules": (str(TESTS / "shared_modules.py"), {}),
}
OTHER_CASES: dict[str, Case] = {
    "dcgan": ("dcgan", {"batch_size": "12"}),
    "esrgan": ("esrgan", {"batch_size": "6"}),
    "restoration": ("restoration", {"batch_size": "6"}),
    "super_resolution": ("super_resolution", {"batch_size": "6"}),
    "translation": ("translation", {"batch_size": "3"}),
}


@pytest.mark.parametrize(
    ("cases", "size"),
    [
        (CASES, 2),
        pytest.param(OTHER_CASES, 2, marks=pytest.mark.slow),
        pytest.param(CASES | OTHER_CASES, 3, marks=pytest.mark.slow),
    ],
    ids=["some-2", "others-2", "all-3"],
)
def test_every_recipe_ends_with_the_weights_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cases: dict[str, Case], size: int
) -> None:
    monkeypatch.chdir(tmp_path)  # as in the ranks: recipes read images in ./data, if there are any
    trace_all(str(tmp_path), cases, "single", STEPS)
    ranks = start_function_in_ranks(tmp_path, size, trace_all, str(tmp_path), cases, "fsdp", STEPS)
    assert [rank.wait() for rank in ranks] == [0] * size, ranks[0].stdout + ranks[0].stderr
    for name in cases:
        traces = {
            strategy: safetensors.torch.load_file(tmp_path / f"{name}.{strategy}") for strategy in ("single", "fsdp")
        }
        found = compare(traces, tolerance=1e-9)
        assert found and all(one.ok for one in found), f"{name}: {found}"


def test_one_overflow_skips_the_step_of_every_process_in_fp16(tmp_path: Path) -> None:
    ranks = start_function_in_ranks(tmp_path, 2, overflow_once, str(TESTS / "blocky.py"))
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[1].stderr
    before, after, scales = zip(*(rank.stdout.splitlines()[-3:] for rank in ranks), strict=True)
    assert before == after, "the weights have changed although a gradient was infinite"
    assert scales[0] == scales[1] and float(scales[0]) < 65536.0


def test_a_recipe_without_a_network_that_can_be_sharded_is_rejected(tmp_path: Path) -> None:
    ranks = start_function_in_ranks(tmp_path, 2, print_errors, str(TESTS / "duet.py"))
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
    assert ranks[0].stdout.splitlines()[-7:] == [
        "--strategy fsdp: there is nothing to shard, since every network needs double backward; use ddp",
        "--strategy fsdp: parameter 'generator.scale' is a scalar, which cannot be sharded; use ddp",
        "--strategy fsdp: parameter 'generator.empty' has no elements, so it cannot be sharded; use ddp",
        "--strategy fsdp: parameter 'critic.tied' is also part of network 'generator', but FSDP shards each network "
        "separately; use ddp",
        "--strategy fsdp: phase 'generator' uses a network's weights while they are divided among the processes; call "
        "the network itself, self.NETWORK(...), not its methods, layers or weights; or use ddp",
        "--strategy fsdp: a loss uses a network's weights while they are divided among the processes; call "
        "the network itself, self.NETWORK(...), not its methods, layers or weights; or use ddp",
        "--strategy fsdp: phase 'penalty' computes gradients with create_graph=True, which FSDP does not support; add "
        "'critic' to the recipe's double_backward, so that it is not sharded, or use ddp",
    ]


def test_cast_copies_of_weights_are_not_kept(tmp_path: Path) -> None:
    ranks = start_function_in_ranks(tmp_path, 2, print_cast_caching, str(TESTS / "blocky.py"))
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
    assert ranks[0].stdout.splitlines()[-1] == "[False]"


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        (("blocks",), r"'blocks' of network 'net' cannot be called: list the modules that it contains"),
        (("blocks.0", "blocks.0.0"), r"'blocks\.0\.0' of network 'net' is inside another block"),
        (("block",), r"network 'net' has no module 'block'"),
    ],
)
def test_listed_blocks_that_cannot_be_used_are_rejected(listed: tuple[str, ...], message: str) -> None:
    recipe = Recipe(None, DataSpec(1, 8, 8))
    recipe.phases, recipe.blocks = (Phase("net", "net"),), {"net": listed}
    recipe.net = nn.Module()
    recipe.net.blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 2))])
    with pytest.raises(UserError, match=message):
        blocks_of(recipe, "net")
