"""The memory forecast equals the memory of real steps, which are counted on a CPU."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from counted_memory import (
    Settings,
    print_buffers,
    print_forecast_and_count,
    print_large_forecast,
    print_sharded,
    print_sharded_forecast,
)
from PIL import Image
from running import start_function_in_ranks
from safetensors.torch import save_file
from torch import nn

from paceline.core.errors import UserError
from paceline.parallel.shards import recompute_blocks
from paceline.parallel.torch_internals import FakeTensorMode
from paceline.training import memory
from paceline.training.memory import LikeCuda

GIB = 2**30
TESTS = Path(__file__).parents[1]
CASES: dict[str, tuple[str, Settings]] = {
    "one network with an EMA": ("classification", {"ema_half_life": "500 images"}),
    "recomputed activations": ("classification", {"checkpoint_activations": "on"}),
    "a GAN with a penalty": ("dcgan", {"r1": 1.0, "d_norm": "none", "accumulate": 2}),
    "a GAN with a frozen network": ("super_resolution", {"stage": "adversarial", "vgg": "random"}),
    "bf16": ("dual_gan", {"precision": "bf16"}),
}


SLOW = {"recomputed activations", "one network with an EMA", "a GAN with a frozen network"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES])
def test_the_forecast_equals_the_memory_of_a_real_step(tmp_path: Path, name: str) -> None:
    (process,) = start_function_in_ranks(tmp_path, 1, print_forecast_and_count, *CASES[name])
    assert process.wait() == 0, process.stderr
    found = json.loads(process.stdout.splitlines()[-1])
    for kind in ("weights", "optimizer", "EMA"):
        assert found[f"forecast {kind}"] == found[kind]
    assert bool(found["EMA"]) == ("ema_half_life" in CASES[name][1])
    counted = found["peak activations"] + found["peak gradients"]
    forecast = sum(found[f"forecast {kind}"] for kind in ("activations", "gradients", "batch"))
    assert forecast == pytest.approx(counted, rel=0.02)


def test_the_weights_of_a_network_that_is_read_from_a_file_count_once(tmp_path: Path) -> None:
    widths = [8] * 4 + [64] * 12
    shapes = {f"features.{i}.weight": (width, widths[i - 1] if i else 3, 3, 3) for i, width in enumerate(widths)}
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "vgg.safetensors")
    settings: Settings = {"stage": "adversarial", "vgg": str(tmp_path / "vgg.safetensors")}
    (process,) = start_function_in_ranks(tmp_path, 1, print_buffers, "super_resolution", settings)
    assert process.wait() == 0, process.stderr
    weights = sum(4 * math.prod(shape) for shape in shapes.values())
    assert weights < int(process.stdout.splitlines()[-1]) < 1.5 * weights


@pytest.mark.slow
def test_the_forecast_of_a_large_network_does_not_allocate_it(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / "rows" / split).mkdir(parents=True)
        Image.new("RGB", (6 * 512, 512)).save(tmp_path / "rows" / split / "0.png")
    (process,) = start_function_in_ranks(tmp_path, 1, print_large_forecast, str(tmp_path / "rows"))
    assert process.wait(600) == 0, process.stderr
    found = json.loads(process.stdout.splitlines()[-1])
    assert found["weights"] > 1.6 * GIB and found["forecast"] > 8 * GIB
    assert found["used"] < 1 * GIB


def test_the_weights_and_state_of_a_process_are_those_of_a_sharded_run(tmp_path: Path) -> None:
    settings: Settings = {"width": 32, "batch_size": "8"}
    (forecast,) = start_function_in_ranks(tmp_path, 1, print_sharded_forecast, "classification", settings, 2)
    assert forecast.wait() == 0, forecast.stderr
    ranks = start_function_in_ranks(tmp_path, 2, print_sharded, "classification", settings)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
    found, counted = (json.loads(process.stdout.splitlines()[-1]) for process in (forecast, ranks[0]))
    for kind in ("weights", "optimizer"):
        assert found[kind] == pytest.approx(counted[kind], rel=0.02)


def test_a_network_whose_constructor_reads_numbers_is_built_from_real_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*_: object) -> float:
        try:
            return torch.linspace(0, 1, 2)[1].item()
        except RuntimeError as error:  # as for a network from another library
            raise UserError("cannot be built") from error

    monkeypatch.setattr(memory, "make_recipe", make)
    with FakeTensorMode():
        assert memory._fake_recipe(None, {}) == 1  # type: ignore[arg-type, comparison-overlap]


def test_blocks_with_layer_norm_are_recomputed_as_on_a_gpu() -> None:
    network = nn.Sequential(Normalised(), Normalised())
    recipe = SimpleNamespace(networks={"net": network}, double_backward=(), blocks={})
    assert recompute_blocks(recipe, LikeCuda) == 2  # type: ignore[arg-type]
    with LikeCuda(), torch.autocast("cpu", torch.bfloat16):
        network(torch.ones(2, 4, requires_grad=True)).sum().backward()  # fails if fewer tensors are saved
    assert network[0].linear.weight.grad is not None


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        normal: torch.Tensor = self.norm(self.linear(values))
        return normal
