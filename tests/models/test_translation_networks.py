import pytest
import torch
from torch import nn

from paceline.models.layers import ReflectionPad
from paceline.models.pix2pix import PatchDiscriminator, ResnetGenerator, UnetGenerator, smallest_side_px


def num_parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def test_the_translation_networks_have_the_expected_number_of_parameters():
    with torch.device("meta"):
        assert num_parameters(UnetGenerator(num_levels=8)) == 54_413_955  # pix2pix's unet_256
        assert num_parameters(UnetGenerator(num_levels=9)) == 66_998_915
        assert num_parameters(ResnetGenerator(num_blocks=9)) == 11_383_427
        assert num_parameters(ResnetGenerator(num_blocks=6)) == 7_841_411
        assert num_parameters(PatchDiscriminator(num_layers=3)) == 2_768_705
        assert num_parameters(ResnetGenerator(norm="instance")) == 11_378_179  # CycleGAN's generator
        assert num_parameters(PatchDiscriminator(3, norm="instance")) == 2_764_737


@pytest.mark.parametrize("norm", ["batch", "instance", "none"])
def test_generators_return_images_of_the_input_size(norm):
    torch.manual_seed(0)
    resnet = ResnetGenerator(3, 2, ngf=2, num_blocks=1, norm=norm, dropout=0.5, padding="zero")
    unet = UnetGenerator(3, 2, ngf=2, num_levels=5, norm=norm, dropout=0.5)
    for network, height, width in ((resnet, 12, 20), (unet, 32, 64)):
        made = network(torch.randn(1, 3, height, width))
        assert made.shape == (1, 2, height, width) and made.abs().max() < 1


def test_a_discriminator_returns_a_logit_per_patch_and_depends_on_the_condition():
    torch.manual_seed(0)
    network = PatchDiscriminator(6, ndf=2, num_layers=3, norm="none")
    image, condition = torch.randn(2, 3, 256, 256), torch.randn(2, 3, 256, 256)
    assert network(condition, image).shape == (2, 1, 30, 30)  # one logit for each 70×70 patch, as in the pix2pix paper
    assert not torch.equal(network(condition, image), network(-condition, image))


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4])
def test_smallest_side_px_is_the_smallest_image_that_a_discriminator_accepts(num_layers):
    network = PatchDiscriminator(2, ndf=1, num_layers=num_layers, norm="none")
    side = smallest_side_px(num_layers)
    assert network(*torch.zeros(2, 1, 1, side, side)).numel() == 1
    with pytest.raises(RuntimeError):
        network(*torch.zeros(2, 1, 1, side - 1, side - 1))


def test_weight_names_match_the_pix2pix_implementation():
    with torch.device("meta"):
        resnet = ResnetGenerator(num_blocks=9, dropout=0.5, padding="reflect").state_dict()
        without_dropout = ResnetGenerator(num_blocks=9, padding="zero").state_dict()
        unet = UnetGenerator(num_levels=8, dropout=0.5).state_dict()
        patch = PatchDiscriminator(num_layers=3).state_dict()
    assert resnet["model.1.weight"].shape == (64, 3, 7, 7) and resnet["model.26.weight"].shape == (3, 64, 7, 7)
    assert resnet["model.10.conv_block.1.weight"].shape == resnet["model.10.conv_block.6.weight"].shape
    assert resnet["model.10.conv_block.7.running_mean"].shape == (256,)
    assert resnet["model.19.weight"].shape == (256, 128, 3, 3)
    assert {"model.18.conv_block.0.weight", "model.18.conv_block.3.weight"} <= without_dropout.keys()
    assert unet["model.model.0.weight"].shape == (64, 3, 4, 4) and unet["model.model.3.weight"].shape == (128, 3, 4, 4)
    deepest = "model.model.1" + ".model.3" * 6 + ".model."
    assert unet[deepest + "1.weight"].shape == unet[deepest + "3.weight"].shape == (512, 512, 4, 4)
    assert unet[deepest + "4.running_var"].shape == (512,)
    assert patch["model.0.bias"].shape == (64,) and patch["model.11.weight"].shape == (1, 512, 4, 4)
    assert "model.2.bias" not in patch and patch["model.9.weight"].shape == (512,)


def test_every_parameter_of_a_unet_gets_a_gradient():
    torch.manual_seed(0)
    network = UnetGenerator(1, 1, ngf=1, num_levels=5, norm="none")
    network(torch.randn(1, 1, 32, 32)).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in network.parameters())


def test_pixels_and_logits_are_float32_under_autocast():
    image = torch.randn(1, 3, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        for network in (ResnetGenerator(ngf=2, num_blocks=1), UnetGenerator(ngf=2, num_levels=5)):
            assert network(image).dtype == torch.float32
        assert PatchDiscriminator(6, ndf=2, num_layers=1)(image, image).dtype == torch.float32


def test_deterministic_reflection_padding_matches_torch():
    image = torch.randn(2, 3, 7, 9, dtype=torch.float64, requires_grad=True)
    expected = nn.ReflectionPad2d(3)(image)
    made = ReflectionPad(3).repeatable(image)
    weights = torch.randn_like(expected)
    assert torch.equal(made, expected)
    gradients = [torch.autograd.grad((padded * weights).sum(), image)[0] for padded in (made, expected)]
    torch.testing.assert_close(*gradients)
