"""LPIPS as a loss, with the real package and with random weights for AlexNet, which the package would download."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torchvision.models import alexnet

from paceline.models import features
from paceline.models.features import check_lpips, lpips_loss

pytestmark = pytest.mark.extras
lpips = pytest.importorskip("lpips")


@pytest.fixture
def random_alexnet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Store random weights where torchvision looks for AlexNet's weights before it downloads them."""
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    torch.save(alexnet().state_dict(), folder / "alexnet-owt-7be5be79.pth")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    for cached in (features.load_lpips, features._lpips_on):
        cached.cache_clear()
    yield
    for cached in (features.load_lpips, features._lpips_on):
        cached.cache_clear()


@pytest.mark.usefixtures("random_alexnet")
def test_the_lpips_loss_is_the_mean_of_the_package_and_has_gradients():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a command would print them
        check_lpips()
    generator = torch.Generator().manual_seed(1)
    made, target = (torch.rand(3, 3, 64, 64, generator=generator) * 2 - 1 for _ in range(2))
    made.requires_grad_(True)
    loss = lpips_loss(made, target)
    package = lpips.LPIPS(net="alex", verbose=False).eval()
    pairs = zip(made, target, strict=True)
    torch.testing.assert_close(loss, torch.cat([package(a[None], b[None]) for a, b in pairs]).mean())
    loss.backward()
    assert made.grad is not None and made.grad.abs().sum() > 0
    assert lpips_loss(target, target).item() == 0
    assert not any(parameter.requires_grad for parameter in features.load_lpips().parameters())
    grey = lpips_loss(made[:, :1].detach().double(), target[:, :1].double())
    assert grey.dtype == torch.float64 and grey > 0
