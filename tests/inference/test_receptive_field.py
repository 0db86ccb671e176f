"""With the computed halo (the margin around a tile), computing tile by tile gives the result for the full image."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.inference.receptive_field import ReceptiveField, receptive_field
from paceline.models.pix2pix import ResnetGenerator, UnetGenerator
from paceline.models.srresnet import SRResNet
from paceline.models.unet import UNet

NETWORKS = {
    "srresnet, residual": (lambda: SRResNet(2, width=4, num_blocks=2, norm="batch", output="residual"), 2),
    "srresnet, shared": (lambda: SRResNet(8, width=4, num_blocks=3, shared=True), 8),
    "restoring srresnet": (lambda: SRResNet(1, width=4, num_blocks=2, norm="none", output="residual"), 1),
    "restoring u-net": (lambda: UNet(3, 4, 2), 1),
    "resnet generator": (lambda: ResnetGenerator(ngf=2, num_blocks=2), 1),
    "u-net of pix2pix": (lambda: UnetGenerator(ngf=1, num_levels=5), 1),
}


def field_of(network: nn.Module | Callable[[Tensor], Tensor], output_scale: int = 1) -> ReceptiveField:
    network = copy.deepcopy(network).float() if isinstance(network, nn.Module) else network
    return receptive_field(lambda images: {"image": network(images)}, 3, output_scale)


def lively(network: nn.Module) -> nn.Module:
    """Return the network in float64 with random weights that all affect the output."""
    torch.manual_seed(0)
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.kaiming_uniform_(module.weight, nonlinearity="linear")
        elif isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
    return network.eval().double()


def middle_from_a_tile(network: nn.Module, whole: Tensor, halo: int, begin: int, side: int, scale: int) -> Tensor:
    """Compute one tile from its pixels and a halo (the margin of pixels around the tile)."""
    rows = slice(max(0, begin - halo), begin + side + halo)
    made = network(whole[..., rows, rows])
    place = slice((begin - rows.start) * scale, (begin - rows.start + side) * scale)
    return made[..., place, place]


@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_a_tile_computed_with_its_halo_equals_that_part_of_the_full_result(name):
    make, scale = NETWORKS[name]
    network = lively(make())
    field = field_of(network, scale)
    assert not field.obstacles
    multiple, halo = field.multiple_px, field.tiled_halo_px
    begin, side = halo + multiple, max(multiple, 4)
    length = begin + side + halo + 2 * multiple
    whole = torch.rand(1, 3, length, length, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    place = slice(begin * scale, (begin + side) * scale)
    wanted = network(whole)[..., place, place]
    assert (middle_from_a_tile(network, whole, halo, begin, side, scale) - wanted).abs().max() < 1e-12


@torch.no_grad()
def test_a_halo_one_pixel_narrower_changes_the_result():
    network = lively(SRResNet(1, width=4, num_blocks=2, norm="none", output="residual"))
    field = field_of(network)
    assert field.halo_px == 4 + 2 * 2 + 1 + 4  # head, two blocks with two convolutions each, body, tail
    whole = torch.rand(1, 3, 60, 60, dtype=torch.float64)
    wanted = network(whole)[..., 26:30, 26:30]
    near = middle_from_a_tile(network, whole, field.halo_px - 1, 26, 4, 1)
    assert (near - wanted).abs().max() > 1e-12


def test_tile_sizes_must_be_a_multiple_of_the_total_stride():
    assert field_of(UNet(3, 4, 3)).multiple_px == 8
    assert field_of(ResnetGenerator(ngf=2, num_blocks=1).eval()).multiple_px == 4
    assert field_of(UnetGenerator(ngf=1, num_levels=5).eval()).multiple_px == 32
    assert field_of(SRResNet(4, width=4, num_blocks=1).eval(), 4).multiple_px == 1


def select(images: Tensor) -> Tensor:
    return images + images[images > 0].sum()  # shapes depend on the values, so real values are traced


def resize(images: Tensor) -> Tensor:
    small = F.max_pool2d(F.conv2d(images, torch.ones(3, 3, 3, 3), stride=2), 7, 3)
    return images * F.interpolate(small, images.shape[-2:], mode="bilinear")


STATISTICS = "the network normalises using statistics from the whole image"
OBSTACLES = {  # a network, why it cannot be tiled exactly, whether it reads the whole image, and the tiles' alignment
    "instance norm": (ResnetGenerator(ngf=2, num_blocks=1, norm="instance").eval(), STATISTICS, False, 4),
    "BatchNorm in training mode": (SRResNet(1, width=4, num_blocks=1).train(), STATISTICS, False, 1),
    "mean": (lambda x: x * x.mean((2, 3), keepdim=True), "the network pools over the whole image", True, 1),
    "adaptive pooling": (lambda x: x * F.adaptive_avg_pool2d(x, 1), "whole image", True, 1),
    "norm": (lambda x: x / torch.linalg.vector_norm(x, dim=(2, 3), keepdim=True), "whole image", True, 1),
    "flip": (lambda x: x.flip(-1), "the receptive field of the operation 'flip' is not known", False, 1),
    "selection": (select, "not known", False, 1),
    "resizing by a fraction": (resize, "only integer factors are supported", False, 6),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_layers_that_prevent_tiling_are_reported(name):
    network, obstacle, reads_all, multiple = OBSTACLES[name]
    field = field_of(network)
    assert any(obstacle in found for found in field.obstacles), field.obstacles
    assert (field.reads_all, field.multiple_px) == (reads_all, multiple)


def test_a_norm_over_channels_does_not_read_the_whole_image():
    field = field_of(lambda images: F.normalize(images, dim=1))
    assert not field.reads_all and not field.obstacles


def test_the_halo_accounts_for_pooling_dilation_and_upsampling():
    network = nn.Sequential(
        nn.Conv2d(3, 2, 3, padding=2, dilation=2),
        nn.MaxPool2d(2),
        nn.Conv2d(2, 3, 3, padding=1),
        nn.Upsample(scale_factor=2),
    )
    network = lively(network)
    field = field_of(network)
    assert not field.obstacles and field.multiple_px == 2
    whole = torch.rand(1, 3, 40, 40, dtype=torch.float64)
    with torch.no_grad():
        wanted = network(whole)[..., 16:20, 16:20]
        made = middle_from_a_tile(network, whole, field.tiled_halo_px, 16, 4, 1)
    assert (made - wanted).abs().max() < 1e-12


def test_only_parameters_that_affect_the_result_are_listed():
    network = nn.ModuleDict({"used": nn.Conv2d(3, 3, 1), "idle": nn.Conv2d(3, 3, 1)})
    field = receptive_field(lambda images: {"image": network["used"](images)}, 3)
    used = {name for name, tensor in network.named_parameters() if id(tensor) in field.used}
    assert used == {"used.weight", "used.bias"}
    assert field.results == ("image",)


def test_the_memory_estimate_grows_with_width_but_not_with_depth():
    narrow, wide = (field_of(SRResNet(2, width=width, num_blocks=1), 2).bytes_per_px for width in (32, 64))
    assert 1.8 < wide / narrow < 2.2
    deep = field_of(SRResNet(2, width=32, num_blocks=9), 2).bytes_per_px
    assert deep == pytest.approx(narrow)  # blocks run one after another, so more blocks need no more memory
