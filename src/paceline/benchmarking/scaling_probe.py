"""What `plan` measures: one device alone; in turns all at once, with and without small exchanges, and all-reduces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from paceline.benchmarking.scaling_forecast import Link, Measurement, predict
from paceline.benchmarking.step_ladder import (
    Variant,
    from_data,
    gradient_bytes,
    steps_per_block,
    synthetic,
    time_block,
    time_sum,
)
from paceline.config.resolve import Config
from paceline.parallel.batchnorm import has_batchnorm, synchronize
from paceline.parallel.world import Place, World, join
from paceline.training.build import Parts, assemble

ROUNDS = 21
BLOCK_SECONDS = 0.15  # short ones: a machine that others use changes from second to second
SMALL_BYTES = 1024  # BatchNorm's sums have about as many
LEAST_BYTES = 2**20  # to see a bandwidth, where the gradients are smaller
GLOO_BUCKET, NCCL_BUCKET = 5 * 2**20, 25 * 2**20


def measure_scaling(config: Config, path: str, batches: list[int], check: bool) -> None:
    """This process's part; the first rank writes what was seen."""
    target = assemble(config) if check else None
    world = target.world if target else join(config.run, distributed=True)
    parts = {batch: one_of_several(config, batch, world) for batch in batches}
    variants = {batch: synthetic(str(batch), part, alone=False) for batch, part in parts.items()}
    first = parts[batches[0]]
    single = one_device(config, batches[0], world) if _has_batchnorm_of_its_own(config, world) else first
    alone = synthetic("alone", single, alone=True)
    with _no_exchange() as counted:
        variants[batches[0]].advance()
    blocks = {batch: _quiet_block(variant, world) for batch, variant in variants.items()}
    alone_steps = steps_per_block(alone, world, BLOCK_SECONDS)
    ddp = from_data("ddp", target) if target else None
    ddp_steps = steps_per_block(ddp, world, BLOCK_SECONDS) if ddp else 0
    exchanges = len(counted) or _torch_batchnorm_exchanges(first)
    exchanges += len(first.recipe.phases) if first.recipe.signals else 0
    base = Measurement(
        alone_seconds={},
        step_seconds={},
        images_per_sample=first.feed.repeats,
        gradient_bytes=gradient_bytes(first),
        exchanges=exchanges,
        overlap=0.0 if world.device.type == "cpu" else 1.0,  # on a CPU the exchange needs the cores that compute
        bucket_bytes=NCCL_BUCKET if world.backend == "nccl" else GLOO_BUCKET,
        networks=[phase.network for phase in first.recipe.phases],
        rounds=ROUNDS,
        threads=torch.get_num_threads() if world.device.type == "cpu" else 0,
    )
    # Before and after the turns, so that what is predicted and checked in them never follows a wait of all but one.
    lonely = [time_block(alone, alone_steps, world) / alone_steps for _ in range(ROUNDS // 2)]
    turns: list[tuple[Measurement, float | None]] = []
    for _ in range(ROUNDS):
        seconds = {}
        for batch, variant in variants.items():
            with _no_exchange():
                seconds[batch] = time_block(variant, blocks[batch], world) / blocks[batch]
        added = 0.0
        if counted and world.size > 1:
            loud = time_block(variants[batches[-1]], blocks[batches[-1]], world) / blocks[batches[-1]]
            added = (loud - seconds[batches[-1]]) / len(counted)
        seen = replace(base, step_seconds=seconds, link=_link(base, world, added))
        speed = ddp.images * ddp_steps / time_block(ddp, ddp_steps, world) if ddp else None
        turns.append((seen, speed))
    lonely += [time_block(alone, alone_steps, world) / alone_steps for _ in range(ROUNDS - len(lonely))]
    if world.is_first:
        base = replace(base, alone_seconds={batches[0]: float(np.median(lonely))})
        Path(path).write_text(json.dumps(_middle(base, turns, config)))
    world.wait_for_all()
    world.leave()


def one_device(config: Config, batch: int, world: World) -> Parts:
    """The step of a run on one device, which has torch's BatchNorm and nobody to wait for."""
    alone = config.with_run(strategy="single", devices=1, gpus="", batch_size=str(batch))
    return assemble(alone, World(Place(), world.device))


def one_of_several(config: Config, batch: int, world: World) -> Parts:
    """The step of one device, with the BatchNorm that it would have among others."""
    parts = one_device(config, batch, world)
    if _has_batchnorm_of_its_own(config, world):
        for name, network in parts.recipe.networks.items():
            if has_batchnorm(network):
                setattr(parts.recipe, name, synchronize(network, ours=True))
    return parts


def _has_batchnorm_of_its_own(config: Config, world: World) -> bool:
    """Whether a step among others is timed with another BatchNorm than alone; on GPUs both have torch's."""
    return world.device.type == "cpu" and config.run.sync_batchnorm != "off"


@contextmanager
def _no_exchange() -> Iterator[list[int]]:
    """Inside, an exchange only notes its bytes, as among one process, whose sum is its own."""
    reduce, gather, noted = dist.all_reduce, dist.all_gather_into_tensor, []

    def note(tensor: Any, *arguments: Any, **options: Any) -> None:
        noted.append(tensor.numel() * tensor.element_size())

    def note_gathered(everyones: Any, own: Any, *arguments: Any, **options: Any) -> None:
        note(own)
        everyones.zero_()[: own.numel()] = own

    dist.all_reduce, dist.all_gather_into_tensor = note, note_gathered  # type: ignore[assignment]
    try:
        yield noted
    finally:
        dist.all_reduce, dist.all_gather_into_tensor = reduce, gather


def _quiet_block(variant: Variant, world: World) -> int:
    with _no_exchange():
        return steps_per_block(variant, world, BLOCK_SECONDS)


def _torch_batchnorm_exchanges(parts: Parts) -> int:
    """torch's SyncBatchNorm, which GPUs use, exchanges once on the way there and once on the way back."""
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    norms = [module for module in parts.recipe.modules() if has_batchnorm(module) and not list(module.children())]
    hooks = [module.register_forward_hook(count) for module in norms]
    parts.step(next(parts.feed.steps(0, parts.feed.images_per_step)))
    for hook in hooks:
        hook.remove()
    return 2 * calls


def _link(base: Measurement, world: World, added: float) -> Link | None:
    """The link as it is now; `added` is what a small exchange adds to a step, where a step was seen with them.

    That is more than such an exchange alone takes: processes that have worked do not arrive together.
    """
    if world.size == 1:
        return None
    large = max(LEAST_BYTES, sum(base.gradient_bytes.values()))
    short, long = time_sum(SMALL_BYTES, world), time_sum(large, world)
    ring = 2 * (world.size - 1) / world.size
    return Link(max(short, added), ring * (large - SMALL_BYTES) / max(long - short, 1e-9), world.size)


def _middle(base: Measurement, turns: list[tuple[Measurement, float | None]], config: Config) -> dict[str, Any]:
    """The median of all turns, and the prediction of each beside what was measured in it."""
    links = [seen.link for seen, _ in turns if seen.link]
    steps = {b: float(np.median([seen.step_seconds[b] for seen, _ in turns])) for b in turns[0][0].step_seconds}
    link = None
    if links:
        latency = float(np.median([one.latency_seconds for one in links]))
        link = Link(latency, float(np.median([one.bytes_per_second for one in links])), links[0].devices)
    checked = [
        {
            "predicted": predict(
                replace(seen, alone_seconds=base.alone_seconds),
                seen.link,
                config.run.devices,
                int(config.run.batch_size),
            ).images_per_second,
            "measured": speed,
        }
        for seen, speed in turns
        if speed is not None
    ]
    return asdict(replace(base, step_seconds=steps, link=link)) | {"checked": checked or None}
