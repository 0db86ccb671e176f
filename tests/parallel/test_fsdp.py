"""Networks that are divided among the processes train like networks in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
from running import start_function_in_ranks
from sharded import Case, trace_all

from paceline.commands.verify import compare

HERE = Path(__file__).parent
STEPS = 3
CASES: dict[str, Case] = {
    "classification": ("classification", {"clip": 0.5, "batch_size": "12"}),
    "dcgan": ("dcgan", {"batch_size": "12"}),
    "dual_gan": ("dual_gan", {"batch_size": "12", "accumulate": 2}),
    "esrgan": ("esrgan", {"batch_size": "6"}),
    "restoration": ("restoration", {"batch_size": "6"}),
    "super_resolution": ("super_resolution", {"batch_size": "6"}),
    "translation": ("translation", {"batch_size": "3"}),
}


@pytest.mark.parametrize("size", [2, 3])
def test_every_recipe_ends_with_the_weights_of_one_process(tmp_path: Path, size: int) -> None:
    trace_all(str(tmp_path), CASES, "single", STEPS)
    ranks = start_function_in_ranks(tmp_path, size, trace_all, str(tmp_path), CASES, "fsdp", STEPS)
    assert [rank.wait() for rank in ranks] == [0] * size, ranks[0].stdout + ranks[0].stderr
    for name in CASES:
        traces = {
            strategy: safetensors.torch.load_file(tmp_path / f"{name}.{strategy}") for strategy in ("single", "fsdp")
        }
        found = compare(traces, tolerance=1e-9)
        assert found and all(one.ok for one in found), f"{name}: {found}"
        print(name, size, max(one.value for one in found))
