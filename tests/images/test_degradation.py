"""The second-order degradation: each step is compared with SciPy, Pillow or PyTorch's own functions."""

import io
import math

import numpy as np
import pytest
import scipy.ndimage
import scipy.special
import scipy.stats
import torch
import torch.nn.functional as F
from photographs import photograph
from PIL import Image

from paceline.images.degradation.operations import (
    AREA,
    BICUBIC,
    BILINEAR,
    CHROMA_TABLE,
    LUMA_TABLE,
    NUM_BLUR_NUMBERS,
    SIDE,
    Canvas,
    Numbers,
    Resize,
    Shape,
    add_noise,
    bell_kernels,
    blur,
    field_keys,
    full_canvas,
    jpeg,
    normalised,
    pad,
    quantisation_tables,
    random_blur_kernels,
    random_noise,
    resize_images,
    sinc_kernels,
    to_normal,
    to_poisson,
    uniform_field,
)
from paceline.images.degradation.second_order import (
    FIRST,
    NUM_NUMBERS,
    degrade,
    random_scale,
)

NAMES = ("astronaut", "coffee", "chelsea")


def photographs(height: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return crops of photographs as levels [n, 3, height, width]."""
    crops = [photograph(name)[100 : 100 + height, 120 : 120 + width] for name in NAMES]
    return torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2).to(dtype)


def on_canvas(images: list[torch.Tensor], height: int, width: int) -> Canvas:
    """Return images [c, h, w] of different sizes on one canvas, whose remaining pixels are noise."""
    pixels = torch.rand(len(images), images[0].shape[0], height, width, dtype=images[0].dtype) * 255
    for number, image in enumerate(images):
        pixels[number, :, : image.shape[1], : image.shape[2]] = image
    sides = (torch.tensor([image.shape[dim] for image in images]) for dim in (1, 2))
    return Canvas(pixels, *sides)


def resize(canvas: Canvas, height: torch.Tensor, width: torch.Tensor, filters: torch.Tensor, shape: tuple[int, int]):
    return resize_images(canvas, Resize(height, width, filters, shape))


def uniforms(rows: int, columns: int = NUM_NUMBERS, seed: int = 0) -> torch.Tensor:
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed))


def constant(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_each_image_is_padded_beyond_its_own_border(mode):
    images = [photographs(9, 13)[0], photographs(6, 7)[1]]
    padded = pad(on_canvas(images, 10, 14), 4, (18, 22), mode)
    for image, found in zip(images, padded, strict=True):
        wanted = F.pad(image[None], [4] * 4, mode=mode)[0]
        assert torch.equal(found[:, : wanted.shape[1], : wanted.shape[2]], wanted)


def test_blur_equals_scipy_for_images_of_different_sizes():
    images = [photographs(40, 48, torch.float64)[0], photographs(31, 25, torch.float64)[1]]
    kernels = random_blur_kernels(Numbers(uniforms(2, NUM_BLUR_NUMBERS).double()), 1.0, 0.0, 3.0)
    made = blur(on_canvas(images, 40, 48), kernels).pixels
    for image, kernel, found in zip(images, normalised(kernels), made, strict=True):
        for channel, filtered in zip(image, found, strict=True):
            wanted = scipy.ndimage.convolve(channel.numpy(), kernel.numpy(), mode="mirror")
            np.testing.assert_allclose(filtered[: image.shape[1], : image.shape[2]], wanted, atol=1e-9)


def test_anisotropic_generalised_and_plateau_kernels_equal_their_formulas():
    angle, sigmas, beta = 0.7, (2.5, 0.8), 1.6
    plateau = torch.tensor([False, True])
    shape = Shape(
        torch.tensor([15, 15]),
        tuple(constant(s, s) for s in sigmas),
        constant(angle, angle),
        constant(beta, beta),
        plateau,
    )
    rotation = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    inverse = np.linalg.inv(rotation @ np.diag(np.square(sigmas)) @ rotation.T)
    offset = np.arange(SIDE) - SIDE // 2
    grid = np.stack(np.meshgrid(offset, offset), axis=-1)  # columns first
    distance = np.einsum("hwi,ij,hwj->hw", grid, inverse, grid)
    inside = np.abs(grid).max(axis=-1) <= 7
    for found, values in zip(
        normalised(bell_kernels(shape)), (np.exp(-0.5 * distance**beta), 1 / (1 + distance**beta)), strict=True
    ):
        wanted = values * inside
        np.testing.assert_allclose(found, wanted / wanted.sum(), atol=1e-12)


def test_sinc_kernels_equal_scipy_and_remove_frequencies_above_the_cutoff():
    found = normalised(sinc_kernels(torch.tensor([21]), constant(math.pi / 2)))[0].numpy()
    offset = np.arange(SIDE) - SIDE // 2
    radius = np.hypot(offset[:, None], offset)
    with np.errstate(invalid="ignore"):
        wanted = (math.pi / 2) * scipy.special.j1(math.pi / 2 * radius) / (2 * math.pi * radius)
    wanted[SIDE // 2, SIDE // 2] = (math.pi / 2) ** 2 / (4 * math.pi)
    np.testing.assert_allclose(found, wanted / wanted.sum(), atol=1e-7)
    response = np.abs(np.fft.fft2(found, (64, 64)))
    assert response[0, 4] > 0.9 and response[0, 28] < 0.1


@pytest.mark.parametrize(("number", "mode"), [(BILINEAR, "bilinear"), (BICUBIC, "bicubic")])
def test_resizing_equals_interpolate_for_each_image_of_a_batch(number, mode):
    images = [photographs(33, 40, torch.float64)[0], photographs(20, 27, torch.float64)[1]]
    sizes = [(12, 50), (30, 9)]
    height, width = (torch.tensor(side) for side in zip(*sizes, strict=True))
    made = resize(on_canvas(images, 33, 40), height, width, torch.full((2,), number), (30, 50)).pixels
    for image, size, found in zip(images, sizes, made, strict=True):
        wanted = F.interpolate(image[None], size, mode=mode, align_corners=False)[0]
        torch.testing.assert_close(found[:, : size[0], : size[1]], wanted, atol=1e-9, rtol=0)


def test_area_resizing_preserves_the_mean_and_equals_average_pooling():
    image = photographs(36, 48, torch.float64)[:1]
    made = resize(full_canvas(image), torch.tensor([9]), torch.tensor([16]), torch.tensor([AREA]), (12, 20))
    torch.testing.assert_close(made.pixels[..., :9, :16], F.avg_pool2d(image, (4, 3)), atol=1e-9, rtol=0)
    uneven = resize(full_canvas(image), torch.tensor([11]), torch.tensor([17]), torch.tensor([AREA]), (11, 17))
    torch.testing.assert_close(uneven.pixels.mean(), image.mean())


def saved(image: np.ndarray, quality: int) -> np.ndarray:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=quality)
    return np.array(Image.open(buffer))


@pytest.mark.parametrize("quality", [10, 30, 49, 50, 75, 95])
def test_jpeg_quantisation_tables_equal_those_in_a_file(quality):
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16)).save(buffer, "JPEG", quality=quality)
    stored = Image.open(buffer).quantization
    for number, base in enumerate((LUMA_TABLE, CHROMA_TABLE)):
        found = quantisation_tables(torch.tensor([quality]), base, torch.int64)
        assert found.flatten().tolist() == list(stored[number])


@pytest.mark.parametrize("quality", [30, 60, 95])
def test_jpeg_is_close_to_the_file_that_pillow_writes(quality):
    images = [photographs(96, 112)[0], photographs(81, 67)[1], photographs(50, 111)[2]]
    made = jpeg(on_canvas(images, 100, 120), torch.full((3,), quality)).pixels
    for image, found in zip(images, made, strict=True):
        levels = image.permute(1, 2, 0).byte().numpy()
        wanted = saved(levels, quality).astype(int)
        difference = np.abs(found[:, : image.shape[1], : image.shape[2]].permute(1, 2, 0).numpy() - wanted)
        compression = np.abs(levels.astype(int) - wanted).mean()
        assert difference.mean() < 0.2 * compression
        assert (difference <= 2).mean() > 0.95


def test_jpeg_of_grey_images_is_close_to_the_file_that_pillow_writes():
    levels = photograph("camera")[:70, :90]
    image = torch.from_numpy(levels.reshape(1, 1, 70, 90)).float()
    found = jpeg(full_canvas(image), torch.tensor([40])).pixels[0, 0].numpy()
    assert (np.abs(found - saved(levels.reshape(70, 90), 40)) <= 1).mean() > 0.995


def test_noise_fields_are_uniform_independent_and_depend_only_on_their_seeds():
    seeds = uniforms(3, 2, seed=5)
    keys = field_keys(seeds[:, 0], seeds[:, 1])
    field = uniform_field(keys, (3, 64, 64), torch.float32)
    assert field.min() > 0 and field.max() < 1
    assert scipy.stats.kstest(field.flatten().numpy(), "uniform").pvalue > 1e-3
    flat = field.flatten(1)
    assert torch.corrcoef(flat).fill_diagonal_(0).abs().max() < 0.04
    for shift in (1, 64, 64 * 64):
        assert abs(torch.corrcoef(torch.stack([flat[0], flat[0].roll(shift)]))[0, 1]) < 0.04
    again = uniform_field(keys[1:2], (3, 64, 64), torch.float32)
    assert torch.equal(again[0], field[1])


@pytest.mark.parametrize("mean", [0.0, 0.3, 2.0, 4.9, 5.1, 20.0, 200.0])
def test_poisson_numbers_follow_the_distribution_of_scipy(mean):
    uniform = (torch.arange(50_000, dtype=torch.float64) + 0.5) / 50_000
    found = to_poisson(uniform, to_normal(uniform), torch.full_like(uniform, mean))
    wanted = scipy.stats.poisson.ppf(uniform.numpy(), mean)
    assert np.abs(found.numpy() - wanted).max() <= (1 if mean >= 5 else 0)
    assert (found.numpy() != wanted).mean() < 0.03
    torch.testing.assert_close(found.mean().item(), mean, atol=0.02, rtol=0)


@pytest.mark.parametrize("kind", [0.0, 0.9])
def test_grey_noise_is_equal_in_all_channels_and_colour_noise_is_not(kind):
    numbers = torch.tensor([[kind, 0.99, 0.0, 0.3, 0.4], [kind, 0.99, 0.9, 0.5, 0.6]])
    levels = torch.full((2, 3, 64, 64), 100.0)
    grey, coloured = add_noise(full_canvas(levels), random_noise(Numbers(numbers), 20.0, 2.0)).pixels - 100
    assert torch.equal(grey[0], grey[2]) and not torch.equal(coloured[0], coloured[2])
    for added in (grey, coloured):
        assert added.std().item() == pytest.approx(20, rel=0.1)  # a Poisson number with mean 100 deviates by 10
        assert abs(added.mean().item()) < 1


def test_scales_have_the_probabilities_and_ranges_of_the_paper():
    direction, amount = uniforms(20_000, 2, seed=3).unbind(1)
    scale = random_scale(direction, amount, FIRST)
    assert scale.min() >= 0.15 and scale.max() <= 1.5
    shares = [(scale > 1).float().mean(), (scale < 1).float().mean(), (scale == 1).float().mean()]
    np.testing.assert_allclose(shares, (0.2, 0.7, 0.1), atol=0.02)


@pytest.mark.parametrize("scale", [2, 4])
def test_degraded_images_are_small_8_bit_images_that_depend_only_on_their_own_numbers(scale):
    images = photographs(64, 80) / 127.5 - 1
    numbers = uniforms(3)
    low = degrade(images, numbers, scale)
    assert low.shape == (3, 3, 64 // scale, 80 // scale) and low.dtype == torch.float32
    levels = (low + 1) * 127.5
    torch.testing.assert_close(levels, levels.round(), atol=1e-4, rtol=0)
    assert levels.min() >= -1e-4 and levels.max() <= 255.0001
    assert torch.equal(degrade(images[1:2], numbers[1:2], scale), low[1:2])
    assert not torch.equal(degrade(images, uniforms(3, seed=1), scale), low)
