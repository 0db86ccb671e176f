"""The memory forecast equals the memory of real steps, which are counted on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from counted_memory import (
    Settings,
    print_forecast_and_count,
)
from running import start_function_in_ranks

GIB = 2**30
TESTS = Path(__file__).parents[1]
CASES: dict[str, tuple[str, Settings]] = {
    "one network with an EMA": ("classification", {"ema_half_life": "500 images"}),
    "recomputed activations": ("classification", {"checkpoint_activations": "on"}),
    "a GAN with a penalty": ("dcgan", {"r1": 1.0, "d_norm": "none", "accumulate": 2}),
    "a GAN with a frozen network": ("super_resolution", {"stage": "adversarial", "vgg": "random"}),
    "bf16": ("dual_gan", {"precision": "bf16"}),
}


@pytest.mark.parametrize("name", CASES)
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
