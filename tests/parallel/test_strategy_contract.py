"""Every strategy declares its limits, and on one device it produces the same weights as a single process."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import safetensors.torch
from running import start_function_in_ranks
from sharded import trace_all

from paceline.commands.configure import configure
from paceline.commands.verify import compare, differences
from paceline.core.registry import load_class, names
from paceline.parallel.strategy import Feature, Strategy, why_unavailable

NAMES = names("strategy")


@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_declares_its_limits(name: str) -> None:
    strategy = load_class("strategy", name, Strategy)
    reasons = [strategy.why_not(feature) for feature in get_args(Feature)]
    assert all(isinstance(reason, str) and not reason.endswith(".") for reason in reasons)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "single"])
def test_a_strategy_on_one_device_produces_the_same_weights_as_a_single_process(name: str, tiny: str) -> None:
    strategy = load_class("strategy", name, Strategy)
    if why := why_unavailable(strategy, on_gpus=False):
        pytest.skip(why)
    config = configure(tiny, {"accelerator": "cpu", "batch_size": "16"}, small=True)
    found = differences(config, ["single", name], steps=3, tolerance=1e-12)
    assert found and all(one.ok for one in found)


def test_modules_with_several_names_train_on_two_devices_as_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # as in the ranks: recipes read images in ./data, if there are any
    cases = {"shared": (str(Path(__file__).parents[1] / "shared_modules.py"), {})}
    trace_all(str(tmp_path), cases, "single", 3)
    ranks = start_function_in_ranks(tmp_path, 2, trace_all, str(tmp_path), cases, "ddp", 3)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stdout + ranks[0].stderr
    traces = {name: safetensors.torch.load_file(tmp_path / f"shared.{name}") for name in ("single", "ddp")}
    found = compare(traces, tolerance=1e-9)
    assert found and all(one.ok for one in found), found
