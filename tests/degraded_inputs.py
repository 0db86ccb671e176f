"""A function that multi-process tests run in each rank: it records the inputs from the second-order degradation."""

from __future__ import annotations

import numpy as np
from ranks import make_parts

from paceline.training.evaluate import training_evaluator

TINY = {
    **{"num_blocks": 1, "width": 2, "growth": 2, "d_width": 2, "vgg": "random", "scale": "2"},
    **{"content": "l1", "tv": 0.0},
}
REAL = {"degradation": "second_order", "stage": "adversarial", "logits": "pixel", "relativistic": False}


def write_inputs(path: str, devices: int, loader: str) -> None:
    """Write the low-resolution inputs of two training steps and the samples' indices to PATH-RANK.npz."""
    settings = {"crop": 32, "batch_size": "4", "images": 64, "devices": devices, "loader": loader, "precision": "fp32"}
    parts = make_parts("esrgan", **TINY, **REAL, **settings)
    evaluator = training_evaluator(parts)
    assert evaluator is not None and evaluator.protocol["degradation"] == "second_order"
    found: dict[str, np.ndarray] = {}
    for number, data in enumerate(parts.feed.steps(0, 8)):
        batch = parts.step.finish(data.fetched[0][0])
        found |= {f"low{number}": parts.recipe.low_resolution(batch).numpy(), f"index{number}": batch["index"].numpy()}
    np.savez(f"{path}-{parts.world.rank}.npz", **found)
    parts.world.wait_for_all()
    parts.world.leave()
