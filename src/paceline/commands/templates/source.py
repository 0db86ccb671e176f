"""A small synthetic set, to start your own source from: `paceline train classification --data ./my_source.py`.

A source says which samples there are and reads them as they are: pictures as uint8, numbers as int64.
Order, crops, flips and batches are the run's business, so the same file serves every loader.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.config.settings import RunSettings, setting
from paceline.contracts.recipe import DataSpec
from paceline.data.source import ArraySource

SIZE_PX = 16
NUM_SAMPLES = {"train": 1000, "test": 200}


class MySource(ArraySource):
    """Noisy pictures of a bright bar, and whether it lies or stands."""

    @dataclass(frozen=True)
    class Settings(RunSettings):
        """The source's own settings, beside those of every run; each can be given as `--set name=value`."""

        noise: float = setting(20.0, "strength of the noise in grey levels of 255", at_least=0)

    def __init__(self, split: str, settings: Settings) -> None:
        """Reads or makes one split; `settings.data_root` is the folder for a source that has files."""
        seed = list(NUM_SAMPLES).index(split)  # fixed: the same samples in every process and in every run
        random = np.random.Generator(np.random.Philox(key=seed))
        count = NUM_SAMPLES[split]
        label = random.integers(0, 2, count)
        middle = random.uniform(5, SIZE_PX - 5, (2, count, 1, 1))
        down, right = np.mgrid[:SIZE_PX, :SIZE_PX]
        down, right = np.abs(down - middle[0]), np.abs(right - middle[1])
        lies = label[:, None, None] == 0
        bar = np.where(lies, (down < 2) & (right < 5), (down < 5) & (right < 2))
        pictures = 60 + 120 * bar + random.normal(0, settings.noise, bar.shape)
        super().__init__(
            arrays={
                "image": pictures.clip(0, 255).astype(np.uint8)[..., None],  # [sample, height, width, channel]
                "label": label.astype(np.int64),
            },
            spec=DataSpec(
                channels=1,
                height=SIZE_PX,
                width=SIZE_PX,
                num_classes=2,
                class_names=("lies", "stands"),
                flip_allowed=True,  # a mirrored bar lies or stands as before
            ),
        )
