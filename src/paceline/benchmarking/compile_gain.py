"""What compiled networks gain on this machine: steps with and without torch.compile take turns."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from paceline.benchmarking.step_ladder import ROUNDS, steps_per_block, synthetic, time_block
from paceline.config.resolve import Config
from paceline.core.activity import activity
from paceline.core.files import write_json
from paceline.parallel.world import join
from paceline.training.build import assemble
from paceline.training.compile import is_compiled


def measure_compile_gain(config: Config, path: str) -> None:
    """Time steps on one device; write the fraction of the time that compiled networks save to a JSON file."""
    world = join(config.run, distributed=False)
    activity("compiling the networks of the self-test")
    built = [assemble(config.with_run(compile=choice), world) for choice in ("off", "on")]
    compiled = built[1].recipe.single_networks.values()
    variants = [synthetic(str(number), parts, alone=False) for number, parts in enumerate(built)]
    blocks = [steps_per_block(variant, world) for variant in variants]
    seconds: list[list[float]] = [[], []]
    for _ in range(ROUNDS):
        for variant, steps, times in zip(variants, blocks, seconds, strict=True):
            times.append(time_block(variant, steps, world) / steps)
    eager, faster = (float(np.median(times)) for times in seconds)
    gain = 1 - faster / eager if any(map(is_compiled, compiled)) else 0.0
    write_json(Path(path), {"gain": max(0.0, gain)})
