"""RRDBNet, the U-Net discriminator, and losses that compare images by frequencies and structure."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from skimage.metrics import structural_similarity

from paceline.core.errors import UserError
from paceline.models.esrgan import RRDBNet, UNetDiscriminator, double_repeatably
from paceline.models.features import Features
from paceline.models.losses import fft_loss, ssim_loss


def random_images(height: int, width: int, count: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def test_rrdbnet_has_the_parameters_of_the_public_checkpoints():
    network = RRDBNet()
    assert sum(parameter.numel() for parameter in network.parameters()) == 16_697_987
    names = {name.rpartition(".")[0] for name in network.state_dict() if not name.startswith("body")}
    assert names == {"conv_first", "conv_body", "conv_up1", "conv_up2", "conv_hr", "conv_last"}
    assert "body.22.rdb3.conv5.weight" in network.state_dict()


@pytest.mark.parametrize("scale", [1, 2, 4])
def test_images_of_any_size_are_upscaled_by_the_scale(scale):
    network = RRDBNet(scale, width=4, num_blocks=1, growth=2)
    assert network(random_images(7, 10)).shape == (2, 3, 7 * scale, 10 * scale)


@pytest.mark.extras
@pytest.mark.parametrize("scale", [2, 4])
def test_rrdbnet_equals_spandrels_network_with_the_same_weights(scale):
    spandrel = pytest.importorskip("spandrel")
    torch.manual_seed(0)
    network = RRDBNet(scale, width=8, num_blocks=2, growth=32).eval()
    theirs = spandrel.ModelLoader().load_from_state_dict(dict(network.state_dict()))
    assert theirs.scale == scale
    low = random_images(8, 12)
    with torch.no_grad():
        wanted = theirs.model(low * 0.5 + 0.5) * 2 - 1
        torch.testing.assert_close(network(low), wanted, atol=1e-5, rtol=1e-5)


def test_the_unet_discriminator_rates_each_pixel_and_normalises_its_weights():
    torch.manual_seed(0)
    network = UNetDiscriminator(width=4)
    images = random_images(16, 24)
    assert network(images).shape == (2, 1, 16, 24)
    for _ in range(50):
        network(images)
    network.eval()
    weight = network.conv3.weight.flatten(1)
    assert torch.linalg.matrix_norm(weight, 2).item() == pytest.approx(1, rel=1e-3)
    buffers = dict(network.named_buffers())
    assert buffers and buffers.keys() <= network.state_dict().keys()


def test_evaluation_does_not_change_the_vectors_of_spectral_normalisation():
    network = UNetDiscriminator(width=2).eval()
    before = {name: value.clone() for name, value in network.named_buffers()}
    network(random_images(8, 8))
    assert all(torch.equal(value, before[name]) for name, value in network.named_buffers())


def test_deterministic_upsampling_equals_bilinear_interpolation():
    features = random_images(5, 6).double()
    wanted = F.interpolate(features, scale_factor=2, mode="bilinear", align_corners=False)
    torch.testing.assert_close(double_repeatably(features), wanted)


def test_several_vgg_layers_are_computed_in_one_pass():
    several = Features("random", "conv2_2", "relu1_2", "conv3_4").all(random_images(16, 16))
    for name, found in zip(("conv2_2", "relu1_2", "conv3_4"), several, strict=True):
        assert torch.equal(found, Features("random", name)(random_images(16, 16)))


def test_the_fft_loss_equals_numpy():
    one, other = random_images(12, 9).double(), random_images(12, 9, seed=1).double()
    difference = np.fft.rfft2((one - other).numpy(), norm="ortho")
    wanted = np.abs(np.stack([difference.real, difference.imag])).mean()
    assert fft_loss(one, other).item() == pytest.approx(wanted)
    assert fft_loss(one, one).item() == 0


def test_the_ssim_loss_equals_scikit_image():
    one = random_images(30, 26, count=1).double()
    other = one + 0.2 * random_images(30, 26, count=1, seed=1).double()
    similarity = structural_similarity(
        *(images[0].permute(1, 2, 0).numpy() for images in (one, other)),
        data_range=2,
        channel_axis=2,
        gaussian_weights=True,
        sigma=1.5,
        use_sample_covariance=False,
        full=True,
    )[1]
    assert ssim_loss(one, other).item() == pytest.approx(1 - similarity[5:-5, 5:-5].mean(), rel=1e-6)
    with pytest.raises(UserError, match="at least 11×11"):
        ssim_loss(one[..., :8], other[..., :8])
