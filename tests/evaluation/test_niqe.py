"""NIQE: the shipped model, its reaction to distortions, and `paceline measure --niqe`."""

import json
from pathlib import Path

import numpy as np
import pytest
import scipy.ndimage
import scipy.stats
import torch
from photographs import photograph
from PIL import Image

from paceline.cli.app import run
from paceline.core.errors import UserError
from paceline.evaluation.image_metrics import BLOCK_PX, _fit_asymmetric, block_features, load_model, niqe

FITTED_TO = ("astronaut", "brick", "camera", "coins", "grass", "gravel", "motorcycle_left", "motorcycle_right")


def levels_of(name: str) -> torch.Tensor:
    return torch.from_numpy(np.atleast_3d(photograph(name))).permute(2, 0, 1).double()


@pytest.fixture(scope="module")
def photo() -> torch.Tensor:
    return levels_of("chelsea")[None, :, :288, :384]


@pytest.mark.slow
def test_the_shipped_model_is_the_fit_to_bundled_photographs():
    kept = []
    for name in FITTED_TO:  # the few photographs are used in overlapping blocks, of which only sharp ones count
        features, sharpness = block_features(levels_of(name), stride_px=16)
        kept.append(features[sharpness >= 0.75 * sharpness.max()])
    found, shipped = torch.cat(kept), load_model()
    torch.testing.assert_close(found.mean(0), shipped.mean, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.T.cov(), shipped.covariance, rtol=1e-2, atol=1e-3)
    assert torch.linalg.matrix_rank(shipped.covariance) == 36


@pytest.mark.parametrize("shape", [0.8, 2.0, 4.0])
def test_the_moment_fit_recovers_the_parameters_of_a_generalised_gaussian(shape):
    values = scipy.stats.gennorm.rvs(shape, scale=1.5, size=(2, 300, 300), random_state=0)
    found, left, right, mean = _fit_asymmetric(torch.from_numpy(values))
    np.testing.assert_allclose(found, shape, rtol=0.05)
    np.testing.assert_allclose(left, 1.5, rtol=0.05)
    np.testing.assert_allclose(right, 1.5, rtol=0.05)
    np.testing.assert_allclose(mean, 0, atol=0.06)


def test_stronger_distortions_have_a_higher_niqe(photo):
    def blurred(sigma: float) -> torch.Tensor:
        return torch.from_numpy(scipy.ndimage.gaussian_filter(photo.numpy(), (0, 0, sigma, sigma)))

    def noisy(sigma: float) -> torch.Tensor:
        noise = torch.randn(photo.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return (photo + sigma * noise).clamp(0, 255)

    for distorted in (blurred, noisy):
        weak, strong = (niqe(distorted(sigma)).item() for sigma in ((1.0, 3.0) if distorted is blurred else (15, 60)))
        assert niqe(photo).item() < weak < strong


def test_a_batch_has_the_same_values_as_single_images(photo):
    both = torch.cat([photo, photo.flip(3)])
    torch.testing.assert_close(niqe(both), torch.cat([niqe(photo), niqe(photo.flip(3))]))


def test_an_image_with_one_block_is_rejected(photo):
    with pytest.raises(UserError, match="100×120 pixels is too small for NIQE"):
        niqe(photo[..., : BLOCK_PX + 24, : BLOCK_PX + 4])


def test_measure_computes_niqe_with_and_without_targets(photo, tmp_path: Path, capsys):
    made, real = tmp_path / "made", tmp_path / "real"
    for folder in (made, real):
        folder.mkdir()
        Image.fromarray(photo[0].permute(1, 2, 0).byte().numpy()).save(folder / "one.png")
    wanted = niqe(photo).item()
    assert run(["measure", str(made), "--niqe", "--json", str(tmp_path / "alone.json")]) == 0
    assert json.loads((tmp_path / "alone.json").read_text())["metrics"]["niqe"] == pytest.approx(wanted)
    assert run(["measure", str(made), str(real), "--niqe", "--json", str(tmp_path / "both.json")]) == 0
    assert json.loads((tmp_path / "both.json").read_text())["metrics"]["niqe[rgb]"] == pytest.approx(wanted)
    assert "fitted to photographs bundled with Paceline" in capsys.readouterr().out
    assert run(["measure", str(made)]) == 2
    assert "no TARGETS to compare with; add them, or use --niqe" in capsys.readouterr().err
    Image.new("RGB", (20, 20)).save(made / "small.png")
    assert run(["measure", str(made), "--niqe"]) == 1
    assert "small.png: the image: 20×20 pixels is too small for NIQE" in capsys.readouterr().out
