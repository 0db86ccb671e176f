"""The float16 kernels for Inception accumulate in float32, and weights lose almost no precision.

Without a GPU, the kernels run in Triton's interpreter (see tests/conftest.py).
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from narrow_inception import file_network
from torch import Tensor

from paceline.core.gpu import float32_products
from paceline.evaluation.inception import inception_network

pytest.importorskip("triton")

from paceline.evaluation import inception_half as kernels
from paceline.evaluation.inception_half import Half

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.gpu if torch.cuda.is_available() else []
ROUNDED = 2**-11  # the relative rounding error of float16


def images(*shape: int, seed: int = 0) -> Tensor:
    """Return a float16 [n, h, w, c] tensor of positive and negative random numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.float16)


def channels_first(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2)


def test_pairs_of_float16_numbers_keep_the_precision_of_large_and_small_weights():
    weight = torch.randn(40, 8, 3, 3) * torch.logspace(-6, 2, 40)[:, None, None, None]
    whole = kernels.two_halves(weight, torch.randn(40))
    both = (whole.high.double() + whole.low.double()) * whole.scale
    kept = both[:, :8, :40].permute(2, 1, 0).reshape(weight.shape)
    largest = weight.abs().amax(dim=(1, 2, 3), keepdim=True)
    assert ((kept - weight).abs() <= largest * 2**-22).all()
    assert ((weight.half() - weight).abs() > largest * 2**-14).any(), "a single float16 would lose more"
    assert both[:, 8:].abs().sum() == both[:, :, 40:].abs().sum() == 0, "the padding of the tiles must be zero"


@pytest.mark.parametrize(
    "num_in, num_out, kernel, stride, padding",
    [
        (64, 48, (1, 1), 1, (0, 0)),
        (32, 80, (3, 3), 2, (0, 0)),
        (80, 64, (5, 5), 1, (2, 2)),  # 80 channels are not a whole number of tiles
        (8, 16, (1, 7), 1, (0, 3)),
        (128, 130, (7, 1), 1, (3, 0)),
    ],
)
def test_a_convolution_rounds_only_once_and_writes_only_its_own_channels(num_in, num_out, kernel, stride, padding):
    torch.manual_seed(0)
    weight = torch.randn(num_out, num_in, *kernel, device=DEVICE) / (num_in * kernel[0] * kernel[1]) ** 0.5
    bias = torch.randn(num_out, device=DEVICE)
    wide = images(3, 9, 8, 16 + num_in)
    x = wide[..., 16:]
    wanted = F.conv2d(channels_first(x).double(), weight.double(), bias.double(), stride, padding)
    out = torch.full((3, *wanted.shape[2:], num_out + 32), -7.0, dtype=torch.float16, device=DEVICE)
    kernels.convolve(x, kernels.two_halves(weight, bias), out[..., 8:-24], stride, padding, relu=True)
    found = channels_first(out[..., 8:-24]).double()
    assert ((found - wanted.relu()).abs() <= 1.05 * ROUNDED * wanted.relu() + 1e-5).all()
    assert (out[..., :8] == -7).all() and (out[..., -24:] == -7).all()
    sums = torch.empty((3, *wanted.shape[2:], num_out), device=DEVICE)
    kernels.convolve(x, kernels.two_halves(weight, bias), sums, stride, padding, relu=False)
    assert torch.allclose(channels_first(sums).double(), wanted, rtol=1e-4, atol=1e-4), "not summed in float32"


@pytest.mark.parametrize("stride, padding", [(2, 0), (1, 1)])
def test_max_pooling_takes_the_largest_of_nine_neighbours(stride, padding):
    x = images(2, 9, 11, 24)
    wanted = F.max_pool2d(channels_first(x).float(), 3, stride, padding)
    out = torch.empty((2, *wanted.shape[2:], 40), dtype=torch.float16, device=DEVICE)
    kernels.pool(x, out[..., 16:], stride, padding, average=False)
    assert torch.equal(channels_first(out[..., 16:]).float(), wanted)


def test_average_pooling_excludes_padding():
    x = torch.randn(2, 5, 6, 24, device=DEVICE)
    wanted = F.avg_pool2d(channels_first(x), 3, 1, 1, count_include_pad=False).relu()
    out = torch.empty(2, 5, 6, 24, dtype=torch.float16, device=DEVICE)
    kernels.pool(x, out, 1, 1, average=True)
    assert ((channels_first(out) - wanted).abs() <= 1.05 * ROUNDED * wanted + 1e-6).all()


@pytest.mark.slow
@torch.no_grad()
def test_the_whole_network_computes_the_same_features_in_float16_and_float32():
    torch.manual_seed(0)
    network = inception_network(file_network().state_dict()).to(DEVICE)
    seen = torch.rand(2, 3, 75, 75, device=DEVICE) * 2 - 1  # the smallest supported images
    with float32_products(tf32=False):
        wanted, found = network(seen), Half(network)(seen)
    assert found.shape == (2, 2048) and found.dtype == torch.float32
    assert (wanted[0] - wanted[1]).abs().max() > 0.01 * wanted.max(), "images can be distinguished"
    assert (found - wanted).abs().max() < 2e-3 * wanted.max()
