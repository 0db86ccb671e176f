"""VGG19 features equal those from torchvision, and LPIPS its package; both are frozen and not part of the weights."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn
from torchvision.models import alexnet, vgg19

from paceline.core.errors import UserError
from paceline.models import features
from paceline.models.features import (
    CONVOLUTIONS_PER_STAGE,
    IMAGENET_MEAN,
    IMAGENET_STD,
    Features,
    check_lpips,
    lpips_loss,
)

WIDTHS = (2, 2, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6)
IMAGES = torch.rand(2, 3, 40, 48, generator=torch.Generator().manual_seed(0)) * 2 - 1


def layers(padding: str = "zeros") -> nn.Sequential:
    """Return a narrow VGG19 with the same layer order as torchvision."""
    torch.manual_seed(0)
    modules: list[nn.Module] = []
    widths, channels = iter(WIDTHS), 3
    for count in CONVOLUTIONS_PER_STAGE:
        for _ in range(count):
            width = next(widths)
            modules += [nn.Conv2d(channels, width, 3, padding=1, padding_mode=padding), nn.ReLU()]
            channels = width
        modules.append(nn.MaxPool2d(2))
    return nn.Sequential(*modules)


def saved(folder: Path, tensors: dict[str, torch.Tensor], name: str) -> str:
    path = folder / name
    if path.suffix == ".pth":
        torch.save(tensors, path)
    else:
        safetensors.torch.save_file(tensors, path)
    return str(path)


def normalised(images: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(values)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
    return ((images + 1) / 2 - mean) / std


def test_images_too_small_for_the_pooling_layers_are_rejected():
    assert Features("random", "conv5_4")(torch.zeros(1, 3, 16, 17)).shape[-2:] == (1, 1)
    with pytest.raises(UserError, match="vgg_layer=conv5_4: needs images of at least 16×16 pixels, not 20×15"):
        Features("random", "conv5_4")(torch.zeros(1, 3, 15, 20))


@pytest.mark.parametrize("file", ["vgg.pth", "vgg.safetensors"])
@pytest.mark.parametrize(("layer", "modules"), [("conv5_4", 35), ("relu5_4", 36), ("relu1_2", 4), ("conv3_1", 11)])
def test_features_equal_those_from_the_torchvision_layers(tmp_path, file, layer, modules):
    network = layers()
    path = saved(tmp_path, {f"features.{name}": tensor for name, tensor in network.named_parameters()}, file)
    found = Features(path, layer)(IMAGES)
    torch.testing.assert_close(found, network[:modules](normalised(IMAGES)))
    assert not found.requires_grad


def test_vgg_layers_are_numbered_as_in_torchvision():
    with torch.device("meta"):
        network = vgg19(init_weights=False)
    convolutions = [number for number, module in enumerate(network.features) if isinstance(module, nn.Conv2d)]
    assert convolutions == [number for number, module in enumerate(layers()) if isinstance(module, nn.Conv2d)]
    assert convolutions[-1] == 34


def test_a_rescaled_vgg_file_whose_first_layer_converts_colours_is_supported(tmp_path):
    network = layers()
    torch.manual_seed(1)
    colours = nn.Conv2d(3, 3, 1)
    numbers = iter((2, 5, 9, 12, 16, 19, 22, 25, 29, 32, 35, 38, 42, 45, 48, 51))  # layer numbers of the convolutions
    tensors = {f"0.{name}": tensor for name, tensor in colours.state_dict().items()}
    for module in network:
        if isinstance(module, nn.Conv2d):
            number = next(numbers)
            tensors |= {f"{number}.{name}": tensor for name, tensor in module.state_dict().items()}
    found = Features(saved(tmp_path, tensors, "rescaled.pth"), "conv4_2")(IMAGES)
    torch.testing.assert_close(found, network[:22](colours((IMAGES + 1) / 2)))


def test_only_the_image_gets_a_gradient_and_vgg_weights_are_not_in_the_state_dict():
    class Recipe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = Features("random")

    recipe = Recipe()
    images = IMAGES.clone().requires_grad_(True)
    recipe.features(images).square().sum().backward()
    assert images.grad is not None and images.grad.any()
    assert not list(recipe.parameters()) and not recipe.state_dict()
    with torch.no_grad():
        assert not recipe.features(images).requires_grad


def test_vgg_weights_are_shared_and_features_have_the_dtype_of_the_images():
    first, second = Features("random"), Features("random")
    assert all(one is other for one, other in zip(sum(first.load(), ()), sum(second.load(), ()), strict=True))
    assert Features("random")(IMAGES.double()).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        half = first(IMAGES)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), second(IMAGES), atol=0.2, rtol=0.1)


def test_several_vgg_layers_are_computed_in_one_pass_and_grey_images_have_three_equal_channels():
    names = ("conv2_2", "relu1_2", "conv3_4")
    for name, found in zip(names, Features("random", *names).all(IMAGES), strict=True):
        assert torch.equal(found, Features("random", name)(IMAGES))
    grey = Features("random", "relu2_2")(IMAGES[:, :1])
    assert torch.equal(grey, Features("random", "relu2_2")(IMAGES[:, :1].expand(-1, 3, -1, -1)))


def test_unusable_vgg_files_are_reported(tmp_path):
    with pytest.raises(UserError, match="unknown layer of VGG19 'conv5_5'; did you mean 'conv5_4'"):
        Features("random", "conv5_5")
    cases = {
        str(tmp_path / "gone.pth"): "no such file",
        saved(
            tmp_path, {"a.weight": torch.zeros(4, 4, 3, 3)}, "other.pth"
        ): "does not contain VGG19's convolution weights",
        saved(tmp_path, {"features.0.weight": torch.zeros(4, 3, 3, 3)}, "short.safetensors"): "has only 1 convolutions",
    }
    (tmp_path / "broken.pth").write_bytes(b"nothing")
    cases[str(tmp_path / "broken.pth")] = "was not written by torch.save$"
    (tmp_path / "empty.pth").touch()
    cases[str(tmp_path / "empty.pth")] = "is empty$"
    whole = saved(tmp_path, {"features.0.weight": torch.zeros(4, 3, 3, 3)}, "cut.pth")
    Path(whole).write_bytes(Path(whole).read_bytes()[:-100])
    cases[whole] = "cannot be read; the file may be truncated"
    torch.save(torch.nn.ReLU(), tmp_path / "program.pth")
    cases[str(tmp_path / "program.pth")] = (
        "contains objects other than tensors, so it was not loaded; save only the state_dict$"
    )
    for path, message in cases.items():
        with pytest.raises(UserError, match=message):
            Features(path)(IMAGES)


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


@pytest.mark.extras
@pytest.mark.usefixtures("random_alexnet")
def test_the_lpips_loss_is_the_mean_of_the_package_and_has_gradients():
    lpips = pytest.importorskip("lpips")
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
