"""Functions that tests of the memory forecast run in processes of their own, since a forecast leaves fake tensors."""

from __future__ import annotations

import json
import resource
from typing import Any

from paceline.commands.configure import configure
from paceline.config.resolve import Config
from paceline.core.registry import load_class
from paceline.core.types import SettingValue
from paceline.parallel.shards import own_rows
from paceline.parallel.strategy import MemoryShares, Strategy
from paceline.training.build import Parts, assemble
from paceline.training.memory import BLOCK_BYTES, Kind, StorageLog, forecast, mark_recipe

Settings = dict[str, SettingValue]


def print_forecast_and_count(recipe: str, settings: Settings) -> None:
    """Print the memory of a step on the CPU as JSON: first as counted in a real step, then as forecast."""
    config = configure(recipe, {"accelerator": "cpu", **settings}, small=True)
    counted = count_step(config)  # first, because the forecast leaves fake tensors in caches
    found = forecast(config)
    memory = found.memory(Strategy, 1, found.samples_per_device(1))
    print(json.dumps(counted | {f"forecast {kind}": memory.bytes.get(kind, 0) for kind in Kind}))


def print_buffers(recipe: str, settings: Settings) -> None:
    """Print the forecast buffers of a step, in a process that has not trained."""
    config = configure(recipe, {"accelerator": "cpu", **settings}, small=True)
    print(forecast(config).stored.peak(MemoryShares(), 2)[0][Kind.BUFFERS])


def count_step(config: Config) -> dict[str, int]:
    """Train one step, and return the bytes of weights, gradients, state and EMA, and the peak of a second step."""
    parts = assemble(config)
    parts.recipe.train()
    data = next(parts.feed.steps(0, parts.feed.images_per_step))  # all phases run in the first step
    gradients: dict[str, int] = {}

    def watch(phase: Any, learner: Any) -> None:
        gradients[phase.network] = _rounded(own_rows(p.grad) for p in learner.parameters)

    parts.step(data, watch=watch)
    parts.strategy.trainable.release()  # hooks need parameters that require grad
    log = StorageLog(parts.world.device)
    with log:
        mark_recipe(log, parts.recipe, parts.step.learners)
        log.peaks.clear()
        parts.step(data)
    sizes = max(log.peaks.values(), key=lambda live: sum(live.values()))
    peak = {kind: sum(size for column, size in sizes.items() if column.kind == kind) for kind in Kind}
    parts.world.leave()
    return (
        _bytes_of_parts(parts) | {"all gradients": sum(gradients.values())} | {f"peak {k}": v for k, v in peak.items()}
    )


def _bytes_of_parts(parts: Parts) -> dict[str, int]:
    learners = parts.step.learners.values()
    return {
        "weights": _rounded(own_rows(p) for p in parts.recipe.parameters()),
        "optimizer": _rounded(t for one in learners for state in one.optimizer.state.values() for t in state.values()),
        "EMA": _rounded(t for one in learners for t in one.ema),
    }


def _rounded(tensors: Any) -> int:
    """Return the size of tensors, each rounded up to blocks of the CUDA allocator."""
    sizes: list[int] = [tensor.numel() * tensor.element_size() for tensor in tensors]
    return sum(-(-size // BLOCK_BYTES) * BLOCK_BYTES for size in sizes)


def print_sharded(recipe: str, settings: Settings) -> None:
    """Print the bytes of one of several processes that share the weights."""
    config = configure(recipe, {"accelerator": "cpu", "strategy": "fsdp", **settings}, small=True)
    print(json.dumps(count_step(config)))


def print_sharded_forecast(recipe: str, settings: Settings, devices: int) -> None:
    """Print the forecast of one of several processes that share the weights."""
    config = configure(recipe, {"accelerator": "cpu", **settings}, small=True)
    found = forecast(config)
    memory = found.memory(load_class("strategy", "fsdp", Strategy), devices, found.samples_per_device(devices))
    print(json.dumps({kind: memory.bytes.get(kind, 0) for kind in Kind}))


def print_large_forecast(rows: str) -> None:
    """Print the forecast of DeepLIIF, and how many bytes of memory this process needed for it."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    settings: Settings = {"preset": "deepliif", "data_root": rows, "validation": 0, "crop": 512, "batch_size": "1"}
    config = configure("translation", settings, elsewhere=True)
    memory = forecast(config).memory(Strategy, 1, 1)
    used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    print(json.dumps({"forecast": memory.total, "weights": memory.bytes[Kind.WEIGHTS], "used": used}))
