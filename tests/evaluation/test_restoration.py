"""PSNR and SSIM equal those from scikit-image and do not depend on how images are split across processes."""

import sys

import numpy as np
import pytest
import torch
from no_run import no_run
from photographs import photograph
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.core.registry import load_class
from paceline.data.source import ArraySource, Subset
from paceline.evaluation.contract import Case
from paceline.evaluation.evaluators.restoration import Restoration
from paceline.evaluation.image_metrics import PSNR_OF_IDENTICAL, luma, psnr, ssim, to_levels
from paceline.models import features

IMAGE = torch.from_numpy(photograph("astronaut")[100:196, 180:300].copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
NOISY = (IMAGE + 0.1 * torch.randn(IMAGE.shape, generator=torch.Generator().manual_seed(0))).clamp(-1, 1)


def source_of(*sizes: tuple[int, int]) -> Subset:
    """Return a source that declares images with these heights and widths."""
    source = ArraySource({"image": np.zeros((len(sizes), 1, 1, 3), np.uint8)}, DataSpec(3, 1, 1))
    source.sizes = np.array(sizes)
    return Subset(source, range(len(sizes)))


def make_evaluator(
    protocol: str = "y", output_scale: int = 4, sizes: tuple[tuple[int, int], ...] = ((96, 120),)
) -> Restoration:
    case = Case(source_of(*sizes), "test", len(sizes), no_run, output_scale)
    evaluator_class = load_class("evaluator", "restoration", Restoration)
    return evaluator_class(case, DataSpec(3, 96, 96), torch.device("cpu"), RunSettings(protocol=protocol))


def measure(predictions: list[dict[str, torch.Tensor]], **settings) -> dict[str, float]:
    evaluator = make_evaluator(**settings)
    for prediction in predictions:
        evaluator.update(prediction, {})
    return evaluator.results(evaluator.sums())


def as_array(levels: torch.Tensor) -> np.ndarray:
    return levels[0].permute(1, 2, 0).numpy()


@pytest.mark.parametrize("colours", [1, 3])
def test_psnr_and_ssim_equal_those_from_scikit_image(colours):
    made, target = (to_levels(images[:, :colours]) for images in (NOISY, IMAGE))
    theirs = peak_signal_noise_ratio(as_array(target), as_array(made), data_range=255)
    assert psnr(made, target).item() == pytest.approx(theirs, abs=1e-6)
    options = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
    theirs = structural_similarity(as_array(target), as_array(made), data_range=255, channel_axis=-1, **options)
    assert ssim(made, target).item() == pytest.approx(theirs, abs=1e-6)


def test_luma_matches_matlab():
    # The expected values are those that MATLAB documents for rgb2ycbcr.
    colours = torch.tensor([[0, 0, 0], [255, 255, 255], [255, 0, 0], [0, 255, 0], [0, 0, 255]]).double()
    found = luma(colours[:, :, None, None]).flatten()
    assert found.tolist() == pytest.approx([16, 235, 81.481, 144.553, 40.966])


@pytest.mark.parametrize(("protocol", "convert"), [("y", luma), ("rgb", lambda levels: levels)])
def test_upscaled_images_are_compared_without_their_border_in_rgb_or_luma(protocol, convert):
    found = measure([{"image": NOISY, "target": IMAGE}], protocol=protocol, output_scale=4)
    made, target = (convert(to_levels(images)[..., 4:-4, 4:-4]) for images in (NOISY, IMAGE))
    assert found == {
        f"psnr[{protocol}]": pytest.approx(psnr(made, target).item(), abs=1e-9),
        f"ssim[{protocol}]": pytest.approx(ssim(made, target).item(), abs=1e-9),
        "count": 1,
    }


def test_images_that_were_not_upscaled_are_compared_including_their_border():
    spoiled = IMAGE.clone()
    spoiled[..., :2, :] *= -1
    prediction = {"image": spoiled, "target": IMAGE}
    assert measure([prediction], output_scale=2)["psnr[y]"] == PSNR_OF_IDENTICAL
    assert measure([prediction], output_scale=1)["psnr[y]"] < 30


def test_images_are_rounded_to_8_bits_before_comparison():
    within, beyond = IMAGE + 0.4 / 127.5, (IMAGE + (IMAGE > 0.99) * 3.0).clamp(min=-1)
    assert measure([{"image": within, "target": IMAGE}])["psnr[y]"] == PSNR_OF_IDENTICAL
    clipped = {"image": beyond.clamp(-1, 1), "target": IMAGE}
    assert measure([{"image": beyond, "target": IMAGE}]) == measure([clipped])


def test_a_metric_is_the_mean_over_images_of_any_size_with_any_number_of_ranks():
    small = {"image": NOISY[..., :40, :50], "target": IMAGE[..., :40, :50]}
    large = {"image": NOISY, "target": IMAGE}
    whole = measure([large, small, small])
    alone = [measure([one])["psnr[y]"] for one in (large, small, small)]
    assert whole["psnr[y]"] == pytest.approx(np.mean(alone), abs=1e-12) and whole["count"] == 3
    first, second, third = (make_evaluator() for _ in range(3))  # three ranks; the third has no images
    first.update(large, {})
    second.update({name: torch.cat([field, field]) for name, field in small.items()}, {})
    spread = third.results(first.sums() + second.sums() + third.sums())
    assert spread == pytest.approx(whole, abs=1e-12)


def test_metrics_for_a_baseline_are_prefixed_with_its_name():
    found = measure([{"image": IMAGE, "bicubic": NOISY, "target": IMAGE}])
    assert set(found) == {"psnr[y]", "ssim[y]", "bicubic_psnr[y]", "bicubic_ssim[y]", "count"}
    assert found["bicubic_psnr[y]"] == measure([{"image": NOISY, "target": IMAGE}])["psnr[y]"]


def test_evaluators_with_different_settings_have_different_protocols():
    evaluators = (make_evaluator(), make_evaluator("rgb"), make_evaluator(output_scale=2))
    protocols = [evaluator.protocol() for evaluator in evaluators]
    assert all(a != b for number, a in enumerate(protocols) for b in protocols[:number])
    assert make_evaluator("rgb").label == "rgb"


def test_an_image_smaller_than_the_ssim_window_is_rejected_before_evaluation():
    message = r"sample 1: a side of 19 pixels is too short .* only 8 can be used; .* the test split"
    with pytest.raises(UserError, match=message):
        make_evaluator(sizes=((40, 40), (40, 19), (40, 23)))
    make_evaluator(sizes=((20, 20),))  # 12 of 20 pixels remain after a 4-pixel border is cut off
    make_evaluator(output_scale=1, sizes=((11, 30),))


STAND_IN = """
import torch

class LPIPS(torch.nn.Module):
    def __init__(self, net, verbose):
        super().__init__()
        if net != "alex":
            raise RuntimeError("no such network")

    def forward(self, one, other):
        assert one.shape[1] == 3 and one.abs().max() <= 1
        return (one - other).abs().mean((1, 2, 3), keepdim=True)
"""


@pytest.fixture
def perceptual_package(tmp_path, monkeypatch):
    """Install a stand-in for the lpips package, because the real one downloads its weights."""
    (tmp_path / "lpips.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "lpips", raising=False)  # the real one may be installed and imported
    features.load_lpips.cache_clear()
    yield tmp_path / "lpips.py"
    features.load_lpips.cache_clear()
    sys.modules.pop("lpips", None)


def test_lpips_is_measured_if_its_package_is_installed(perceptual_package):
    found = measure([{"image": NOISY, "target": IMAGE}])
    wanted = (to_levels(NOISY) - to_levels(IMAGE)).abs().mean().item() / 127.5
    assert found["lpips[y]"] == pytest.approx(wanted, rel=1e-5)
    assert make_evaluator().protocol()["lpips"] == "alex"


def test_lpips_is_skipped_with_a_note_if_its_weights_cannot_be_loaded(perceptual_package):
    perceptual_package.write_text(STAND_IN.replace('!= "alex"', '== "alex"'))
    evaluator = make_evaluator()
    assert evaluator.notes == (
        "LPIPS is not measured, because its network cannot be loaded: RuntimeError: no such network",
    )
    assert "lpips[y]" not in measure([{"image": NOISY, "target": IMAGE}])
