"""VGG19 features equal those from torchvision, and the network is frozen and not part of the recipe's weights."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn
from torchvision.models import vgg19

from paceline.core.errors import UserError
from paceline.models.features import CONVOLUTIONS_PER_STAGE, IMAGENET_MEAN, IMAGENET_STD, Features

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
    path = saved(tmp_path, {f"features.{name}": tensor for name, tensor in network.state_dict().items()}, file)
    torch.testing.assert_close(Features(path, layer)(IMAGES), network[:modules](normalised(IMAGES)))


def test_vgg_parameters_loaded_from_a_file_are_frozen(tmp_path):
    path = saved(tmp_path, dict(layers().named_parameters(prefix="features")), "vgg.pth")
    assert not Features(path, "conv1_2")(IMAGES).requires_grad


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
    features = Features(saved(tmp_path, tensors, "rescaled.pth"), "conv4_2")
    torch.testing.assert_close(features(IMAGES), network[:22](colours((IMAGES + 1) / 2)))


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


def test_several_vgg_layers_are_computed_in_one_pass():
    names = ("conv2_2", "relu1_2", "conv3_4")
    for name, found in zip(names, Features("random", *names).all(IMAGES), strict=True):
        assert torch.equal(found, Features("random", name)(IMAGES))


def test_grey_images_are_repeated_to_three_channels():
    features = Features("random", "relu2_2")
    assert torch.equal(features(IMAGES[:, :1]), features(IMAGES[:, :1].expand(-1, 3, -1, -1)))


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
