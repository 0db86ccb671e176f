"""Images resampled with torch equal those resampled with Pillow."""

import numpy as np
import pytest
import torch
from photographs import photograph
from PIL import Image

from paceline.images.resample import bicubic, bicubic_as_saved, cut_to_multiple

NOISE = np.random.default_rng(0).integers(0, 256, (48, 56, 3), dtype=np.uint8)
IMAGES = {
    "a photograph": photograph("astronaut")[:160, 150:302].copy(),
    "noise": NOISE,
    "hard edges": np.where(NOISE < 128, 0, 255).astype(np.uint8),
}


def as_tensor(image: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(image).permute(2, 0, 1)[None].float() / 127.5 - 1


def as_levels(images: torch.Tensor) -> np.ndarray:
    return ((images + 1) * 127.5)[0].permute(1, 2, 0).numpy()


@pytest.mark.parametrize("factor", [1 / 8, 1 / 4, 1 / 2, 2, 4])
@pytest.mark.parametrize("name", IMAGES)
def test_a_resampled_image_equals_the_one_from_pillow(name, factor):
    image = IMAGES[name]
    height, width = (round(side * factor) for side in image.shape[:2])
    pillows = np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))
    ours = as_levels(bicubic_as_saved(as_tensor(image), height, width))
    assert np.abs(ours - ours.round()).max() < 1e-4, "not rounded to 8-bit levels"
    difference = np.abs(ours - pillows)
    assert difference.max() < 1.01
    assert (difference > 0.5).mean() < 0.02  # only values halfway between two levels are rounded differently


def test_plain_bicubic_resampling_does_not_round_to_8_bits():
    steps = torch.linspace(-0.9, 0.9, 64).expand(1, 3, 64, 64)
    small = bicubic(steps, 16, 16)
    assert small.dtype == torch.float32
    means = steps[0, 0, 0].view(16, 4).mean(1)
    torch.testing.assert_close(small[0, 0, 8, 2:-2], means[2:-2], atol=1e-5, rtol=0)  # weights differ at the border
    assert bicubic(steps.double(), 8, 8).dtype == torch.float64


def test_resampling_depends_neither_on_autocast_nor_on_the_other_images_of_a_batch():
    images = torch.rand(3, 3, 32, 40, generator=torch.Generator().manual_seed(0)) * 2 - 1
    together = bicubic_as_saved(images, 8, 10)
    assert torch.equal(together, torch.cat([bicubic_as_saved(image[None], 8, 10) for image in images]))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(bicubic_as_saved(images, 8, 10), together)
        assert bicubic(images.bfloat16(), 40, 38).dtype == torch.float32


def test_images_are_cropped_at_the_bottom_and_right_to_a_multiple_of_the_scale():
    image = torch.arange(7 * 9.0).view(1, 1, 7, 9)
    assert torch.equal(cut_to_multiple(image, 4), image[..., :4, :8])
    assert cut_to_multiple(image, 1) is not None and cut_to_multiple(image, 1).shape == image.shape


@pytest.mark.parametrize("factor", [2, 4, 8])
@pytest.mark.parametrize("size", [(1, 1), (2, 3), (9, 14)])
def test_upscaling_during_export_gives_the_same_result_including_the_border(factor, size, monkeypatch):
    images = torch.rand(2, 3, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    enlarged = bicubic(images, size[0] * factor, size[1] * factor)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    assert (bicubic(images, size[0] * factor, size[1] * factor) - enlarged).abs().max() < 1e-6
