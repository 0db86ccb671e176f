"""Measurements for `paceline plan`: steps on one device, steps on all devices, and the duration of all-reduces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from paceline.benchmarking.scaling_forecast import Checked, Link, Measurement, predict
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
from paceline.core.files import write_json
from paceline.core.terminal import activity, counted
from paceline.parallel.batchnorm import has_batchnorm, synchronize
from paceline.parallel.place import Place
from paceline.parallel.strategy import AUTO
from paceline.parallel.torch_internals import local_collectives
from paceline.parallel.world import World, join
from paceline.training.build import Parts, assemble

ROUNDS = 21
BLOCK_SECONDS = 0.15  # short blocks, since the load on a shared machine changes from second to second
SMALL_BYTES = 1024  # about the size of BatchNorm statistics
MIN_BYTES = 2**20  # minimum message size for measuring bandwidth
GLOO_BUCKET, NCCL_BUCKET = 5 * 2**20, 25 * 2**20


def measure_scaling(config: Config, path: str, batches: list[int], check: bool) -> None:
    """Run the measurement in this process; rank 0 writes the result to a file."""
    activity("preparing the measurement")
    target = assemble(config) if check else None
    world = target.world if target else join(config.run, distributed=True)
    parts = {batch: one_of_several(config, batch, world) for batch in batches}
    variants = {batch: synthetic(str(batch), part, alone=False) for batch, part in parts.items()}
    first = parts[batches[0]]
    single = one_device(config, batches[0], world) if _has_own_batchnorm(config, world) else first
    alone = synthetic("alone", single, alone=True)
    with local_collectives() as collectives:
        variants[batches[0]].advance()
    blocks = {batch: _local_steps_per_block(variant, world) for batch, variant in variants.items()}
    alone_steps = steps_per_block(alone, world, BLOCK_SECONDS)
    ddp = from_data("ddp", target) if target else None
    ddp_steps = steps_per_block(ddp, world, BLOCK_SECONDS) if ddp else 0
    exchanges = len(collectives) or _torch_batchnorm_exchanges(first)
    exchanges += len(first.recipe.phases) if first.recipe.signals else 0
    base = Measurement(
        alone_seconds={},
        step_seconds={},
        images_per_sample=first.feed.repeats,
        gradient_bytes=gradient_bytes(first),
        exchanges=exchanges,
        overlap=0.0 if world.device.type == "cpu" else 1.0,  # on a CPU, communication and computation share cores
        bucket_bytes=NCCL_BUCKET if world.backend == "nccl" else GLOO_BUCKET,
        networks=tuple(phase.network for phase in first.recipe.phases),
        rounds=ROUNDS,
        threads=torch.get_num_threads() if world.device.type == "cpu" else 0,
    )
    # Time one device alone before and after the rounds, not between them: a round must not start with idle processes.
    activity("measuring one device alone")
    alone_seconds = [time_block(alone, alone_steps, world) / alone_steps for _ in range(ROUNDS // 2)]
    turns: list[tuple[Measurement, float | None]] = []
    for _ in counted(range(ROUNDS), "measuring", ROUNDS):
        seconds = {}
        for batch, variant in variants.items():
            with local_collectives():
                seconds[batch] = time_block(variant, blocks[batch], world) / blocks[batch]
        added = 0.0
        if collectives and world.size > 1:
            with_exchanges = time_block(variants[batches[-1]], blocks[batches[-1]], world) / blocks[batches[-1]]
            added = (with_exchanges - seconds[batches[-1]]) / len(collectives)
        seen = replace(base, step_seconds=seconds, link=_link(base, world, added))
        speed = ddp.images * ddp_steps / time_block(ddp, ddp_steps, world) if ddp else None
        turns.append((seen, speed))
    alone_seconds += [time_block(alone, alone_steps, world) / alone_steps for _ in range(ROUNDS - len(alone_seconds))]
    if world.is_first:
        base = replace(base, alone_seconds={batches[0]: float(np.median(alone_seconds))})
        write_json(Path(path), asdict(_median(base, turns, config)))
    world.wait_for_all()
    world.leave()


def one_device(config: Config, batch: int, world: World) -> Parts:
    """Assemble a run on one device, in this process alone and with torch's BatchNorm."""
    alone = config.with_run(strategy=AUTO["one device"], devices=1, gpus="", batch_size=str(batch))
    return assemble(alone, World(Place(), world.device))


def one_of_several(config: Config, batch: int, world: World) -> Parts:
    """Assemble a run on one device, with the BatchNorm that a run on several devices would use."""
    parts = one_device(config, batch, world)
    if _has_own_batchnorm(config, world):
        for name, network in parts.recipe.networks.items():
            if has_batchnorm(network):
                setattr(parts.recipe, name, synchronize(network, ours=True))
    return parts


def _has_own_batchnorm(config: Config, world: World) -> bool:
    """Return whether to use Paceline's synchronised BatchNorm, as a run on several CPU processes would."""
    return world.device.type == "cpu" and config.run.sync_batchnorm != "off"


def _local_steps_per_block(variant: Variant, world: World) -> int:
    with local_collectives():
        return steps_per_block(variant, world, BLOCK_SECONDS)


def _torch_batchnorm_exchanges(parts: Parts) -> int:
    """Return how many collectives torch's SyncBatchNorm, which is used on GPUs, runs per step."""
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    norms = [module for module in parts.recipe.modules() if has_batchnorm(module) and not list(module.children())]
    hooks = [module.register_forward_hook(count) for module in norms]
    parts.step(next(parts.feed.steps(0, parts.feed.images_per_step)))
    for hook in hooks:
        hook.remove()
    return 2 * calls


def _link(base: Measurement, world: World, added: float) -> Link | None:
    """Measure the link; `added` is the time that a small exchange adds to a step, or 0 if it was not measured.

    The exchange takes longer within a step than alone, because busy processes do not reach it at the same moment.
    """
    if world.size == 1:
        return None
    large = max(MIN_BYTES, sum(base.gradient_bytes.values()))
    short, long = time_sum(SMALL_BYTES, world), time_sum(large, world)
    ring = 2 * (world.size - 1) / world.size
    return Link(max(short, added), ring * (large - SMALL_BYTES) / max(long - short, 1e-9), world.size)


def _median(base: Measurement, turns: Sequence[tuple[Measurement, float | None]], config: Config) -> Measurement:
    """Return the median over all rounds, with the predicted and measured speeds in each round."""
    links = [seen.link for seen, _ in turns if seen.link]
    steps = {b: float(np.median([seen.step_seconds[b] for seen, _ in turns])) for b in turns[0][0].step_seconds}
    link = None
    if links:
        latency = float(np.median([one.latency_seconds for one in links]))
        link = Link(latency, float(np.median([one.bytes_per_second for one in links])), links[0].devices)
    devices, batch = config.run.devices, int(config.run.batch_size)
    checked = []
    for seen, speed in turns:
        if speed is not None:
            whole = replace(seen, alone_seconds=base.alone_seconds)
            checked.append(Checked(predict(whole, seen.link, devices, batch).images_per_second, speed))
    return replace(base, step_seconds=steps, link=link, checked=tuple(checked))
