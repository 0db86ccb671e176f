"""Parts of `apply`: its progress, its errors about memory, and the values that the networks get."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.contracts.data_spec import PixelFormat
from paceline.data.stream import stored, to_unit_range
from paceline.inference import apply
from paceline.inference.receptive_field import receptive_field
from paceline.inference.tiles import choose_tiling, from_pixels, is_out_of_memory
from paceline.models.srresnet import SRResNet


def test_pixels_of_an_earlier_command_count_as_done_but_not_for_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(apply.time, "monotonic", lambda: now)
    progress = apply.ApplyProgress(400_000_000)
    now += 20
    progress.advance(200_000_000, earlier=True)
    assert progress.describe() == "applying: 50% of 400 megapixels, 0 megapixels/s"
    now += 80
    progress.advance(50_000_000)
    assert progress.describe() == "applying: 62% of 400 megapixels, 0.5 megapixels/s, 5:00 left"


def test_an_out_of_memory_error_is_recognised() -> None:
    with pytest.raises(RuntimeError) as raised_by_torch:
        torch.empty(10**15)
    failed = "[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: not enough memory: you tried"
    errors = [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError(failed), raised_by_torch.value]
    assert all(map(is_out_of_memory, errors))
    assert not is_out_of_memory(RuntimeError("expected scalar type Float but found Half"))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_every_pixel_value_becomes_the_same_number_as_in_training(dtype: str, count: int) -> None:
    levels = np.linspace(0, 1, 65536, dtype=np.float32) if dtype == "float32" else np.arange(np.iinfo(dtype).max + 1)
    tiles = torch.from_numpy(levels.astype(dtype).reshape(1, -1, 64, 1).repeat(count, axis=0).repeat(3, axis=3))
    pixels = PixelFormat.of(dtype, (0.0, 1.0) if dtype == "float32" else None)
    in_training = to_unit_range(stored(tiles).permute(0, 3, 1, 2), pixels, torch.float32)
    assert torch.equal(from_pixels(tiles, pixels), in_training)


def test_tiles_are_so_small_that_indices_need_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    network = SRResNet(1, width=8, num_blocks=1).eval()
    field = receptive_field(lambda images: {"image": network(images)}, 3)
    monkeypatch.setattr("paceline.inference.tiles.free_bytes", lambda device: 10**18)
    gpu, side = torch.device("cuda"), 60_000
    tiling = choose_tiling(field, (side, side), gpu)
    assert tiling.halo_px > 0 and (tiling.side_px + 2 * tiling.halo_px) ** 2 * field.elements_per_px < 2**31
    assert choose_tiling(field, (2048, 2048), gpu).halo_px == 0
