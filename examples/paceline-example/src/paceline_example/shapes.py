"""A source of computer-generated images, which needs no download."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline import ArraySource, DataSpec, RunSettings, setting

SIZE_PX = 16
NUM_SAMPLES = {"train": 2000, "test": 400}
CLASSES = ("arrow", "house", "T")


class Shapes(ArraySource):
    """Labelled images of upright arrows, houses and Ts, in random sizes and positions; needs no download."""

    @dataclass(frozen=True)
    class Settings(RunSettings):
        """The settings of this source, in addition to those of every run."""

        noise: float = setting(20.0, "standard deviation of the noise, in grey levels from 0 to 255", at_least=0)

    def __init__(self, split: str, settings: Settings) -> None:
        seed = list(NUM_SAMPLES).index(split)  # a fixed seed gives every process and run the same samples
        random = np.random.Generator(np.random.Philox(key=seed))
        count = NUM_SAMPLES[split]
        label = random.integers(0, len(CLASSES), count)
        radius = random.uniform(4, 6, (count, 1, 1))
        middle = random.uniform(radius, SIZE_PX - 1 - radius, (2, count, 1, 1))
        down, right = np.mgrid[:SIZE_PX, :SIZE_PX]
        shape = draw_shapes(label[:, None, None], (down - middle[0]) / radius, np.abs(right - middle[1]) / radius)
        images = 60 + 120 * shape + random.normal(0, settings.noise, shape.shape)
        super().__init__(
            arrays={
                "image": images.clip(0, 255).astype(np.uint8)[..., None],  # [sample, height, width, channel]
                "label": label.astype(np.int64),
            },
            spec=DataSpec(channels=1, height=SIZE_PX, width=SIZE_PX, num_classes=len(CLASSES), class_names=CLASSES),
        )


def draw_shapes(label: np.ndarray, down: np.ndarray, aside: np.ndarray) -> np.ndarray:
    """Return a mask of each shape's pixels; `down` and `aside` are distances from the shape's centre, in radii."""
    head = (down > -1) & (down < 0) & (aside < 1 + down)
    shaft = (down >= 0) & (down < 1) & (aside < 0.3)
    walls = (down >= 0) & (down < 1) & (aside < 0.8)
    bar = (down > -1) & (down < -0.5) & (aside < 1)
    stem = (down >= -0.5) & (down < 1) & (aside < 0.3)
    return np.select([label == 0, label == 1], [head | shaft, head | walls], bar | stem)
