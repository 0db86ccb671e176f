"""Training images that are most similar to generated images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import make_config

from paceline.data.open_sources import open_sources
from paceline.inference.generate import with_nearest

SIDE = 16
EIGHT_BITS = np.random.default_rng(0).integers(256, size=(20, SIDE, SIDE, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("pixels", "settings"),
    [
        (EIGHT_BITS, {}),
        (EIGHT_BITS.astype(np.uint16) * 257, {}),
        (EIGHT_BITS.astype(np.float32) / 255, {"value_range": "0,1"}),
    ],
    ids=["uint8", "uint16", "float32"],
)
def test_the_nearest_images_do_not_depend_on_the_type_of_pixels(
    pixels: np.ndarray, settings: dict[str, str], tmp_path: Path
) -> None:
    np.savez(tmp_path / "data.npz", x_train=pixels)
    config = make_config("r3gan", data="npz", data_root=str(tmp_path / "data.npz"), size=SIDE, **settings)
    source = open_sources(config)["train"]
    shown = with_nearest(EIGHT_BITS[4:6], source, 2, config.run, torch.device("cpu"))
    assert shown.dtype == np.uint8 and shown.shape == (6, SIDE, SIDE, 3)
    assert np.array_equal(shown[[0, 3]], EIGHT_BITS[4:6]) and np.array_equal(shown[[1, 4]], EIGHT_BITS[4:6])


@pytest.mark.parametrize(("flip", "is_found"), [("on", True), ("off", False)])
def test_a_copy_of_a_mirrored_training_image_is_found_if_training_flips_images(
    flip: str, is_found: bool, tmp_path: Path
) -> None:
    np.savez(tmp_path / "data.npz", x_train=EIGHT_BITS)
    config = make_config("r3gan", data="npz", data_root=str(tmp_path / "data.npz"), size=SIDE, flip=flip)
    mirrored = EIGHT_BITS[7:8, :, ::-1]
    shown = with_nearest(mirrored, open_sources(config)["train"], 20, config.run, torch.device("cpu"))
    assert np.array_equal(shown[1:2], mirrored) == is_found
    as_stored = [min(image.tobytes(), image[:, ::-1].tobytes()) for image in shown[1:]]
    assert len(set(as_stored)) == 20  # every training image once, in one of its two forms
