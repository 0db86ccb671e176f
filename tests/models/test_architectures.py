"""Our networks have the sizes and weight names of papers or public checkpoints, and accept the stated images."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.images.resample import bicubic
from paceline.models import dcgan, srresnet
from paceline.models.esrgan import RRDBNet, UNetDiscriminator, double_repeatably
from paceline.models.layers import ReflectionPad
from paceline.models.pix2pix import PatchDiscriminator, ResnetGenerator, UnetGenerator, smallest_side_px
from paceline.models.srresnet import SRResNet
from paceline.models.unet import UNet

NUM_PARAMETERS: list[tuple[Callable[[], nn.Module], int]] = [
    (lambda: dcgan.Generator(64, 3), 3_576_704),  # the original DCGAN
    (lambda: dcgan.Discriminator(64, 3), 2_765_568),
    (lambda: dcgan.Generator(32, 3), 1_068_928),  # with one fewer layer, for 32-pixel images
    (lambda: dcgan.Discriminator(32, 3), 663_296),
    (lambda: dcgan.Generator(32, 3, smallest_px=2), 2_962_304),  # from the dual-discriminator project
    (lambda: dcgan.Discriminator(32, 3, smallest_px=2), 2_759_424),
    (lambda: UnetGenerator(num_levels=8), 54_413_955),  # pix2pix's unet_256
    (lambda: UnetGenerator(num_levels=9), 66_998_915),
    (lambda: ResnetGenerator(num_blocks=9), 11_383_427),
    (lambda: ResnetGenerator(num_blocks=6), 7_841_411),
    (lambda: ResnetGenerator(norm="instance"), 11_378_179),  # CycleGAN's generator
    (lambda: PatchDiscriminator(num_layers=3), 2_768_705),
    (lambda: PatchDiscriminator(3, norm="instance"), 2_764_737),
    (SRResNet, 1_549_462),
    (lambda: SRResNet(shared=True), 290_054),
    (srresnet.Discriminator, 5_215_425),
    (RRDBNet, 16_697_987),
]


def test_the_networks_have_the_expected_number_of_parameters() -> None:
    with torch.device("meta"):
        for make, expected in NUM_PARAMETERS:
            assert sum(parameter.numel() for parameter in make().parameters()) == expected


def random_images(height: int, width: int, count: int = 2, channels: int = 3) -> Tensor:
    return torch.rand(count, channels, height, width, generator=torch.Generator().manual_seed(0)) * 2 - 1


def patch_logits(images: Tensor) -> Tensor:
    return PatchDiscriminator(6, ndf=2, norm="none")(images, images.flip(0))


# Each network maps images of a size, or noise of a length, to a shape. Generators with tanh have values in [-1, 1].
SHAPES: list[tuple[Callable[[Tensor], Tensor], tuple[int, ...], tuple[int, ...]]] = [
    *(
        (dcgan.Generator(side, channels, nz=7, ngf=2, smallest_px=smallest), (3, 7), (3, channels, side, side))
        for side, channels, smallest in ((32, 1, 2), (64, 3, 4))
    ),
    *(
        (dcgan.Discriminator(side, channels, ndf=2, smallest_px=smallest), (3, channels, side, side), (3,))
        for side, channels, smallest in ((32, 3, 4), (64, 1, 2))
    ),
    *(
        (ResnetGenerator(3, 2, 2, 1, norm, dropout=0.5, padding="zero"), (1, 3, 12, 20), (1, 2, 12, 20))  # type: ignore[arg-type]
        for norm in ("batch", "instance", "none")
    ),
    *(
        (UnetGenerator(3, 2, 2, 5, norm, dropout=0.5), (1, 3, 32, 64), (1, 2, 32, 64))  # type: ignore[arg-type]
        for norm in ("batch", "instance", "none")
    ),
    (patch_logits, (2, 3, 256, 256), (2, 1, 30, 30)),  # one logit for each 70×70 patch, as in the pix2pix paper
    *(
        (SRResNet(scale, width=4, num_blocks=2, shared=shared), (2, 3, 5, 7), (2, 3, 5 * scale, 7 * scale))
        for scale in (1, 2, 4, 8)
        for shared in (False, True)
    ),
    *((srresnet.Discriminator(width=2), (2, 3, *size), (2,)) for size in ((16, 16), (23, 40), (96, 17))),
    *((UNet(width=4), (2, 3, *size), (2, 3, *size)) for size in ((8, 8), (13, 22), (1, 9), (64, 31))),
    *(
        (RRDBNet(scale, width=4, num_blocks=1, growth=2), (2, 3, 7, 10), (2, 3, 7 * scale, 10 * scale))
        for scale in (1, 2, 4)
    ),
    (UNetDiscriminator(width=4), (2, 3, 16, 24), (2, 1, 16, 24)),
]


@pytest.mark.parametrize(("network", "given", "expected"), SHAPES)
def test_a_network_returns_float32_of_the_expected_shape_even_under_autocast(network, given, expected) -> None:
    torch.manual_seed(0)
    inputs = torch.rand(given) * 2 - 1
    for is_half in (False, True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_half):
            made = network(inputs)
        assert made.shape == expected and made.dtype == torch.float32
        if isinstance(network, dcgan.Generator | ResnetGenerator | UnetGenerator):
            assert made.abs().max() < 1
        if isinstance(network, UNet):
            assert (made - inputs).abs().mean() < 0.1, "an untrained network should return nearly its input"


def test_weight_names_match_public_implementations() -> None:
    with torch.device("meta"):
        rrdb = RRDBNet().state_dict()
        generator, discriminator = dcgan.Generator(32, 3, nz=5, ngf=2), dcgan.Discriminator(32, 3, ndf=2)
        resnet = ResnetGenerator(num_blocks=9, dropout=0.5, padding="reflect").state_dict()
        without_dropout = ResnetGenerator(num_blocks=9, padding="zero").state_dict()
        unet = UnetGenerator(num_levels=8, dropout=0.5).state_dict()
        patch = PatchDiscriminator(num_layers=3).state_dict()
    names = {name.rpartition(".")[0] for name in rrdb if not name.startswith("body")}
    assert names == {"conv_first", "conv_body", "conv_up1", "conv_up2", "conv_hr", "conv_last"}
    assert "body.22.rdb3.conv5.weight" in rrdb
    dcgans = {**generator.state_dict(), **discriminator.state_dict()}
    assert {name.partition(".")[0] for name in dcgans} == {"main"}  # as in PyTorch's example
    assert generator.main[0].weight.shape == (5, 8, 4, 4) and generator.main[9].weight.shape == (2, 3, 4, 4)
    assert discriminator.main[0].weight.shape == (2, 3, 4, 4) and discriminator.main[8].weight.shape == (1, 8, 4, 4)
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


def test_dcgan_weights_are_initialised_as_in_the_paper() -> None:
    torch.manual_seed(0)
    for network in (dcgan.Generator(32, 3), dcgan.Discriminator(32, 3)):
        for module in network.modules():
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                assert module.bias is None
                if module.weight.numel() > 10_000:
                    assert module.weight.mean().abs() < 1e-3 and abs(module.weight.std() - 0.02) < 1e-3
            elif isinstance(module, nn.BatchNorm2d):
                assert abs(module.weight.mean() - 1) < 0.01 and 0.01 < module.weight.std() < 0.03
                assert not module.bias.any()


def test_dcgan_has_no_batchnorm_in_its_first_and_last_layers_and_none_at_all_on_request() -> None:
    discriminator, generator = dcgan.Discriminator(64, 3, ndf=2).main, dcgan.Generator(64, 3, ngf=2).main
    assert isinstance(discriminator[1], nn.LeakyReLU) and isinstance(generator[-1], nn.ConvTranspose2d)
    for network, expected in ((discriminator, 3), (generator, 4)):
        assert sum(isinstance(layer, nn.BatchNorm2d) for layer in network) == expected
    plain = dcgan.Discriminator(32, 1, ndf=2, norm="none")
    assert not list(plain.buffers())
    assert all(not layer.bias.any() for layer in plain.main if isinstance(layer, nn.Conv2d))


def test_spectral_norm_keeps_the_largest_singular_value_at_one_and_does_not_change_in_evaluation() -> None:
    torch.manual_seed(0)
    gan = dcgan.Discriminator(32, 3, ndf=4, norm="none", spectral=True).double()
    unet = UNetDiscriminator(width=4).double()
    checked = {gan: [layer for layer in gan.main if isinstance(layer, nn.Conv2d)], unet: [unet.conv3]}
    for network, layers in checked.items():
        images = random_images(32, 32).double()
        for _ in range(50):
            network(images)
        network.eval()
        before = {name: value.clone() for name, value in network.named_buffers()}
        network(images)
        assert all(torch.equal(value, before[name]) for name, value in network.named_buffers())
        for layer in layers:
            assert abs(torch.linalg.matrix_norm(layer.weight.flatten(1), ord=2) - 1) < 1e-3
    assert before and before.keys() <= unet.state_dict().keys()


def test_a_patch_discriminator_depends_on_the_condition_and_accepts_images_from_its_smallest_side_on() -> None:
    torch.manual_seed(0)
    image, condition = torch.randn(2, 2, 3, 64, 64)
    network = PatchDiscriminator(6, ndf=2, num_layers=3, norm="none")
    assert not torch.equal(network(condition, image), network(-condition, image))
    for num_layers in (1, 2, 3, 4):
        network, side = PatchDiscriminator(2, ndf=1, num_layers=num_layers, norm="none"), smallest_side_px(num_layers)
        assert network(*torch.zeros(2, 1, 1, side, side)).numel() == 1
        with pytest.raises(RuntimeError):
            network(*torch.zeros(2, 1, 1, side - 1, side - 1))


def test_every_parameter_of_a_unet_gets_a_gradient() -> None:
    torch.manual_seed(0)
    network = UnetGenerator(1, 1, ngf=1, num_levels=5, norm="none")
    network(torch.randn(1, 1, 32, 32)).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in network.parameters())


def test_shared_blocks_reuse_the_weights_of_one_block() -> None:
    torch.manual_seed(0)
    shared = SRResNet(4, width=4, num_blocks=3, shared=True, norm="none")
    separate = SRResNet(4, width=4, num_blocks=3, norm="none")
    weights, copies = shared.state_dict(), {}
    for name in separate.state_dict():
        group, _, *rest = name.split(".")
        copies[name] = weights[".".join([group, "0", *rest]) if group in ("blocks", "doublings") else name]
    separate.load_state_dict(copies)
    assert torch.equal(shared(random_images(6, 6)), separate(random_images(6, 6)))


def test_an_untrained_network_without_normalisation_is_close_to_bicubic_upscaling() -> None:
    torch.manual_seed(0)
    network = SRResNet(2, width=8, num_blocks=4, norm="none", output="residual")
    assert not any(isinstance(module, nn.BatchNorm2d) for module in network.modules())
    low = random_images(12, 12)
    assert (network(low) - bicubic(low, 24, 24)).abs().mean() < 0.1


def test_with_tanh_inputs_are_scaled_to_0_to_1_and_outputs_are_at_most_1() -> None:
    network = SRResNet(2, width=4, num_blocks=1, output="tanh")
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(5)
    seen: list[Tensor] = []
    network.head[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    assert network(random_images(6, 6)).abs().max() <= 1
    assert seen[0].min() >= 0 and seen[0].max() <= 1


def test_a_unet_has_a_large_receptive_field() -> None:
    torch.manual_seed(0)
    network = UNet(width=4, depth=3)
    images = random_images(64, 64, 1).requires_grad_(True)
    network(images)[0, :, 32, 32].sum().backward()
    rows = images.grad[0].abs().sum((0, 2)).nonzero().flatten()
    assert rows.min() < 16 and rows.max() >= 48


@pytest.mark.extras
@pytest.mark.parametrize("scale", [2, 4])
def test_rrdbnet_equals_spandrels_network_with_the_same_weights(scale: int) -> None:
    spandrel = pytest.importorskip("spandrel")
    torch.manual_seed(0)
    network = RRDBNet(scale, width=8, num_blocks=2, growth=32).eval()
    theirs = spandrel.ModelLoader().load_from_state_dict(dict(network.state_dict()))
    assert theirs.scale == scale
    low = random_images(8, 12)
    with torch.no_grad():
        wanted = theirs.model(low * 0.5 + 0.5) * 2 - 1
        torch.testing.assert_close(network(low), wanted, atol=1e-5, rtol=1e-5)


def test_deterministic_upsampling_and_reflection_padding_equal_those_of_torch() -> None:
    features = random_images(7, 9).double().requires_grad_()
    for made, expected in (
        (double_repeatably(features), F.interpolate(features, scale_factor=2, mode="bilinear", align_corners=False)),
        (ReflectionPad(3).repeatable(features), nn.ReflectionPad2d(3)(features)),
    ):
        torch.testing.assert_close(made, expected)
        weights = torch.randn_like(expected)
        torch.testing.assert_close(*(torch.autograd.grad((x * weights).sum(), features)[0] for x in (made, expected)))
