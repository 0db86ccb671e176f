"""Training images that are most similar to generated images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from ranks import make_config

from paceline.data.source import open_sources
from paceline.inference.generate import with_nearest

SIDE = 16
EIGHT_BITS = np.random.default_rng(0).integers(256, size=(20, SIDE, SIDE, 3), dtype=np.uint8)


def show_nearest(
    images: np.ndarray, count: int, folder: Path, pixels: np.ndarray = EIGHT_BITS, **settings: str
) -> np.ndarray:
    np.savez(folder / "data.npz", x_train=pixels)
    config = make_config("r3gan", data="npz", data_root=str(folder / "data.npz"), size=SIDE, **settings)
    return with_nearest(images, open_sources(config)["train"], count, config.run, torch.device("cpu"))


def test_the_nearest_images_do_not_depend_on_the_type_of_pixels(tmp_path: Path) -> None:
    for pixels, settings in (
        (EIGHT_BITS, {}),
        (EIGHT_BITS.astype(np.uint16) * 257, {}),
        (EIGHT_BITS.astype(np.float32) / 255, {"value_range": "0,1"}),
    ):
        shown = show_nearest(EIGHT_BITS[4:6], 2, tmp_path, pixels, **settings)
        assert shown.dtype == np.uint8 and shown.shape == (6, SIDE, SIDE, 3)
        assert np.array_equal(shown[[0, 3]], EIGHT_BITS[4:6]) and np.array_equal(shown[[1, 4]], EIGHT_BITS[4:6])


def test_a_copy_of_a_mirrored_training_image_is_found_if_training_flips_images(tmp_path: Path) -> None:
    mirrored = EIGHT_BITS[7:8, :, ::-1]
    for flip, is_found in (("on", True), ("off", False)):
        shown = show_nearest(mirrored, 20, tmp_path, flip=flip)
        assert np.array_equal(shown[1:2], mirrored) == is_found
        as_stored = [min(image.tobytes(), image[:, ::-1].tobytes()) for image in shown[1:]]
        assert len(set(as_stored)) == 20  # every training image once, in one of its two forms
