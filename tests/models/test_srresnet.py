"""The networks for super-resolution and restoration, and their discriminator."""

import pytest
import torch
from torch import nn

from paceline.images.resample import bicubic
from paceline.models.srresnet import Discriminator, SRResNet
from paceline.models.unet import UNet


def parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def random_images(height: int, width: int, count: int = 2) -> torch.Tensor:
    return torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(0)) * 2 - 1


def test_srresnet_has_the_expected_parameter_count_with_and_without_shared_blocks():
    assert parameters(SRResNet()) == 1_549_462
    assert parameters(SRResNet(shared=True)) == 290_054


@pytest.mark.parametrize("scale", [1, 2, 4, 8])
@pytest.mark.parametrize("shared", [False, True])
def test_images_of_any_size_are_upscaled_by_the_configured_factor(scale, shared):
    network = SRResNet(scale, width=4, num_blocks=2, shared=shared)
    assert network(random_images(5, 7)).shape == (2, 3, 5 * scale, 7 * scale)


def test_shared_blocks_reuse_the_weights_of_one_block():
    torch.manual_seed(0)
    shared = SRResNet(4, width=4, num_blocks=3, shared=True, norm="none")
    separate = SRResNet(4, width=4, num_blocks=3, norm="none")
    weights = shared.state_dict()
    copies = {}
    for name in separate.state_dict():
        group, _, *rest = name.split(".")
        copies[name] = weights[".".join([group, "0", *rest]) if group in ("blocks", "doublings") else name]
    separate.load_state_dict(copies)
    assert torch.equal(shared(random_images(6, 6)), separate(random_images(6, 6)))


def test_an_untrained_network_without_normalisation_is_close_to_bicubic_upscaling():
    torch.manual_seed(0)
    network = SRResNet(2, width=8, num_blocks=4, norm="none", output="residual")
    assert not any(isinstance(module, nn.BatchNorm2d) for module in network.modules())
    low = random_images(12, 12)
    assert (network(low) - bicubic(low, 24, 24)).abs().mean() < 0.1


def test_with_tanh_inputs_are_scaled_to_0_to_1_and_outputs_are_at_most_1():
    network = SRResNet(2, width=4, num_blocks=1, output="tanh")
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(5)
    assert network(random_images(6, 6)).abs().max() <= 1
    seen = []
    network.head[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    network(random_images(6, 6))
    assert seen[0].min() >= 0 and seen[0].max() <= 1


def test_outputs_are_float32_under_half_precision_autocast():
    for network in (SRResNet(2, width=4, num_blocks=1), UNet(width=4, depth=2), Discriminator(width=2)):
        with torch.autocast("cpu", torch.bfloat16):
            assert network(random_images(32, 32)).dtype == torch.float32


@pytest.mark.parametrize(("height", "width"), [(16, 16), (23, 40), (96, 17)])
def test_a_discriminator_returns_one_logit_per_image_of_any_size(height, width):
    assert Discriminator(width=2)(random_images(height, width)).shape == (2,)
    assert parameters(Discriminator()) == 5_215_425


@pytest.mark.parametrize(("height", "width"), [(8, 8), (13, 22), (1, 9), (64, 31)])
def test_a_unet_accepts_images_of_any_size(height, width):
    torch.manual_seed(0)
    network = UNet(width=4, depth=3)
    some = random_images(height, width)
    assert network(some).shape == some.shape
    assert (network(some) - some).abs().mean() < 0.1, "an untrained network should return nearly its input"


def test_a_unet_has_a_large_receptive_field():
    torch.manual_seed(0)
    network = UNet(width=4, depth=3)
    some = random_images(64, 64, 1).requires_grad_(True)
    network(some)[0, :, 32, 32].sum().backward()
    rows = some.grad[0].abs().sum((0, 2)).nonzero().flatten()
    assert rows.min() < 16 and rows.max() >= 48
