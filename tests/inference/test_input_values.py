"""The networks get the same values in `apply` as in training."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.contracts.data_spec import PixelFormat
from paceline.data.stream import stored, to_unit_range
from paceline.inference.runner import from_pixels


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_every_pixel_value_becomes_the_same_number_as_in_training(dtype: str, count: int) -> None:
    levels = np.linspace(0, 1, 65536, dtype=np.float32) if dtype == "float32" else np.arange(np.iinfo(dtype).max + 1)
    tiles = torch.from_numpy(levels.astype(dtype).reshape(1, -1, 64, 1).repeat(count, axis=0).repeat(3, axis=3))
    pixels = PixelFormat.of(dtype, (0.0, 1.0) if dtype == "float32" else None)
    in_training = to_unit_range(stored(tiles).permute(0, 3, 1, 2), pixels, torch.float32)
    assert torch.equal(from_pixels(tiles, pixels), in_training)
