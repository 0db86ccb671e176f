"""A small synthetic dataset to start from: `paceline train classification --data ./my_source.py`.

A source returns its samples unchanged: images as uint8, labels as int64. The engine takes care of order, crops, flips
and batches, so the same source works with every loader.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline import ArraySource, DataSpec, RunSettings, setting

SIZE_PX = 16
NUM_SAMPLES = {"train": 1000, "test": 200}


class MySource(ArraySource):
    """Noisy images of a bright bar; its orientation is the label."""

    @dataclass(frozen=True)
    class Settings(RunSettings):
        """Settings for this source, in addition to those that every run has; set them with `--set name=value`."""

        noise: float = setting(20.0, "standard deviation of the noise, in grey levels from 0 to 255", at_least=0)

    def __init__(self, split: str, settings: Settings) -> None:
        """Create one split ("train" or "test"). A source that reads files looks for them in `settings.data_root`."""
        seed = list(NUM_SAMPLES).index(split)  # a fixed seed, so every process and every run has the same samples
        random = np.random.Generator(np.random.Philox(key=seed))
        count = NUM_SAMPLES[split]
        label = random.integers(0, 2, count)
        middle = random.uniform(5, SIZE_PX - 5, (2, count, 1, 1))
        down, right = np.mgrid[:SIZE_PX, :SIZE_PX]
        down, right = np.abs(down - middle[0]), np.abs(right - middle[1])
        horizontal = label[:, None, None] == 0
        bar = np.where(horizontal, (down < 2) & (right < 5), (down < 5) & (right < 2))
        images = 60 + 120 * bar + random.normal(0, settings.noise, bar.shape)
        super().__init__(
            arrays={
                "image": images.clip(0, 255).astype(np.uint8)[..., None],  # [sample, height, width, channel]
                "label": label.astype(np.int64),
            },
            spec=DataSpec(
                channels=1,
                height=SIZE_PX,
                width=SIZE_PX,
                num_classes=2,
                class_names=("horizontal", "vertical"),
                flip_allowed=True,  # a flipped bar keeps its orientation
            ),
        )
