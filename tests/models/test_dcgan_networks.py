import pytest
import torch
from torch import nn

from paceline.models.dcgan import Discriminator, Generator


def num_parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize(
    ("size_px", "smallest_px", "generator_parameters", "discriminator_parameters"),
    [
        (64, 4, 3_576_704, 2_765_568),  # the original DCGAN
        (32, 4, 1_068_928, 663_296),  # DCGAN with one fewer layer, for 32-pixel images
        (32, 2, 2_962_304, 2_759_424),  # the networks from the dual-discriminator project
    ],
)
def test_the_dcgan_networks_have_the_expected_number_of_parameters(
    size_px, smallest_px, generator_parameters, discriminator_parameters
):
    with torch.device("meta"):
        generator = Generator(size_px, 3, smallest_px=smallest_px)
        discriminator = Discriminator(size_px, 3, smallest_px=smallest_px)
    assert num_parameters(generator) == generator_parameters
    assert num_parameters(discriminator) == discriminator_parameters


@pytest.mark.parametrize("smallest_px", [2, 4])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size_px", [32, 64])
def test_generated_pixels_are_between_minus_one_and_one_and_each_image_gets_one_logit(size_px, channels, smallest_px):
    torch.manual_seed(0)
    images = Generator(size_px, channels, nz=7, ngf=2, smallest_px=smallest_px)(torch.randn(3, 7))
    assert images.shape == (3, channels, size_px, size_px)
    assert images.abs().max() < 1
    assert Discriminator(size_px, channels, ndf=2, smallest_px=smallest_px)(images).shape == (3,)


def test_weight_names_match_the_pytorch_dcgan_example():
    generator, discriminator = Generator(32, 3, nz=5, ngf=2), Discriminator(32, 3, ndf=2)
    assert {name.partition(".")[0] for network in (generator, discriminator) for name in network.state_dict()} == {
        "main"
    }
    assert generator.main[0].weight.shape == (5, 8, 4, 4) and generator.main[9].weight.shape == (2, 3, 4, 4)
    assert discriminator.main[0].weight.shape == (2, 3, 4, 4) and discriminator.main[8].weight.shape == (1, 8, 4, 4)


def test_weights_are_initialised_as_in_the_dcgan_paper():
    torch.manual_seed(0)
    for network in (Generator(32, 3), Discriminator(32, 3)):
        for module in network.modules():
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                assert module.bias is None
                if module.weight.numel() > 10_000:
                    assert module.weight.mean().abs() < 1e-3 and abs(module.weight.std() - 0.02) < 1e-3
            elif isinstance(module, nn.BatchNorm2d):
                assert abs(module.weight.mean() - 1) < 0.01 and 0.01 < module.weight.std() < 0.03
                assert not module.bias.any()


def test_the_first_discriminator_layer_and_the_last_generator_layer_have_no_batchnorm():
    discriminator, generator = Discriminator(64, 3, ndf=2).main, Generator(64, 3, ngf=2).main
    assert isinstance(discriminator[1], nn.LeakyReLU) and isinstance(generator[-1], nn.ConvTranspose2d)
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in discriminator) == 3
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in generator) == 4


def test_a_discriminator_without_normalisation_has_zero_biases_and_no_buffers():
    network = Discriminator(32, 1, ndf=2, norm="none")
    assert not list(network.buffers())
    assert all(not layer.bias.any() for layer in network.main if isinstance(layer, nn.Conv2d))


def test_spectral_norm_keeps_the_largest_singular_value_of_every_layer_at_one():
    torch.manual_seed(0)
    network = Discriminator(32, 3, ndf=4, norm="none", spectral=True).double()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    for _ in range(50):
        network(images)
    network.eval()
    for layer in network.main:
        if isinstance(layer, nn.Conv2d):
            assert abs(torch.linalg.matrix_norm(layer.weight.flatten(1), ord=2) - 1) < 1e-3


def test_pixels_and_logits_are_float32_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        images = Generator(32, 1, nz=4, ngf=2)(torch.randn(2, 4))
        assert images.dtype == torch.float32
        assert Discriminator(32, 1, ndf=2)(images).dtype == torch.float32
