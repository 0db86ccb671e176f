"""pix2pix and DeepLIIF networks normalise using the test image's statistics (section 3.3 of the pix2pix paper).

The reference networks are built from torch layers as in the papers, and run in training mode on one image, so that
their BatchNorm uses that image's statistics.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from exporting import can_export
from PIL import Image
from test_apply import write_random_weights
from torch import Tensor, nn

import paceline
from paceline.cli.app import run
from paceline.inference.trained import open_image_model

NGF, SIDE = 2, 32


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        half = [nn.ReflectionPad2d(1), nn.Conv2d(width, width, 3, bias=False), nn.BatchNorm2d(width)]
        other = [nn.ReflectionPad2d(1), nn.Conv2d(width, width, 3, bias=False), nn.BatchNorm2d(width)]
        self.conv_block = nn.Sequential(*half, nn.ReLU(), *other)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv_block(x)


def residual_network() -> nn.Module:
    """Build the network c7s1-2, d4, d8, six residual blocks, u4, u2, c7s1-3 (notation of Johnson et al. 2016)."""
    layers: list[nn.Module] = [nn.ReflectionPad2d(3), nn.Conv2d(3, NGF, 7, bias=False), nn.BatchNorm2d(NGF), nn.ReLU()]
    for width in (NGF, 2 * NGF):
        layers += [nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU()]
    layers += [Block(4 * NGF) for _ in range(6)]
    for width in (4 * NGF, 2 * NGF):
        up = nn.ConvTranspose2d(width, width // 2, 3, 2, 1, output_padding=1, bias=False)
        layers += [up, nn.BatchNorm2d(width // 2), nn.ReLU()]
    return nn.ModuleDict({"model": nn.Sequential(*layers, nn.ReflectionPad2d(3), nn.Conv2d(NGF, 3, 7), nn.Tanh())})


class Skip(nn.Module):
    def __init__(self, *layers: nn.Module, last: bool = False) -> None:
        super().__init__()
        self.model, self.last = nn.Sequential(*layers), last

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) if self.last else torch.cat([x, self.model(x)], 1)


def unet() -> nn.Module:
    """Build the U-Net from Isola et al. 2017, section 6.1.1, with five levels."""

    def down(before: int, after: int) -> nn.Module:
        return nn.Conv2d(before, after, 4, 2, 1, bias=False)

    def up(before: int, after: int) -> nn.Module:
        return nn.ConvTranspose2d(before, after, 4, 2, 1, bias=False)

    wide = 8 * NGF
    inner = Skip(nn.LeakyReLU(0.2), down(wide, wide), nn.ReLU(), up(wide, wide), nn.BatchNorm2d(wide))
    for width in (wide, wide // 2, wide // 4):
        norms = nn.BatchNorm2d(width), nn.BatchNorm2d(width // 2)
        first = [nn.LeakyReLU(0.2), down(width // 2, width), norms[0]]
        inner = Skip(*first, inner, nn.ReLU(), up(2 * width, width // 2), norms[1])
    last = nn.ConvTranspose2d(2 * NGF, 3, 4, 2, 1)
    return nn.ModuleDict({"model": Skip(down(3, NGF), inner, nn.ReLU(), last, nn.Tanh(), last=True)})


NETWORKS = {"resnet_6": residual_network, "unet_32": unet}


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def import_network(kind: str, *words: str) -> nn.Module:
    """Save a random network under pix2pix's file name, import the file, and return the original network."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = NETWORKS[kind]()
        for name, tensor in network.state_dict().items():
            if "running" in name:
                tensor.uniform_(0.5, 2)
    torch.save(network.state_dict(), "latest_net_G.pth")
    chosen = [f"generator={kind}", f"ngf={NGF}", "dropout=0", f"crop={SIDE}", "padding=reflect", "d_layers=1", *words]
    settings = [word for one in chosen for word in ("--set", one)]
    command = ["import", "latest_net_G.pth", "--recipe", "translation", "--preset", "pix2pix", *settings]
    assert run([*command, "--out", "ours.safetensors"]) == 0
    return network["model"].train()


def random_image(width: int, height: int) -> np.ndarray:
    return np.random.default_rng(0).integers(256, size=(height, width, 3), dtype=np.uint8)


def levels(network: nn.Module, pixels: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        made = network(torch.from_numpy(pixels).permute(2, 0, 1)[None] / 127.5 - 1)
    return ((made[0].permute(1, 2, 0) + 1) * 127.5).numpy()


@pytest.mark.parametrize("kind", NETWORKS)
def test_an_imported_network_produces_the_same_images_as_the_reference_network(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    network, pixels = import_network(kind), random_image(SIDE, SIDE)
    assert "assumed (not stored in the file): batchnorm=instance\n" in capsys.readouterr().out
    Image.fromarray(pixels).save("input.png")
    assert run(["apply", "ours.safetensors", "input.png", "--out", "made", "--accelerator", "cpu"]) == 0
    wanted = levels(network, pixels)
    with Image.open("made/input.png") as made:
        assert np.abs(np.asarray(made, float) - wanted).max() <= 1 and wanted.std() > 1
    by_api = paceline.load("ours.safetensors", device="cpu").apply(Image.fromarray(pixels))["image"]
    assert np.abs(np.asarray(by_api, float) - wanted).max() <= 1
    unused = import_network(kind, "batchnorm=running").eval()
    ours = levels(open_image_model("ours.safetensors").recipe.generators["G1"], pixels)
    assert np.abs(ours - wanted).max() > 2 and np.abs(ours - levels(unused, pixels)).max() < 0.1


def test_images_in_one_batch_do_not_influence_each_other() -> None:
    network = import_network("resnet_6")
    images = torch.rand(3, 3, SIDE, SIDE) * 2 - 1
    with torch.no_grad():
        made = open_image_model("ours.safetensors").recipe.image_to_image(images)["image"]
        wanted = torch.cat([network(image[None]) for image in images])
    assert (made - wanted).abs().max() < 1e-4


def test_larger_images_are_processed_in_windows_of_the_training_size(capsys: pytest.CaptureFixture[str]) -> None:
    network, pixels = import_network("resnet_6"), random_image(80, 48)
    Image.fromarray(pixels).save("input.png")
    assert run(["apply", "ours.safetensors", "input.png", "--out", "made", "--accelerator", "cpu"]) == 0
    assert f"{SIDE}×{SIDE}-pixel window (the training size)" in capsys.readouterr().out
    with Image.open("made/input.png") as made:
        result = np.asarray(made, float)
    for top, left, rows, columns in ((0, 0, slice(0, 24), slice(0, 24)), (16, 48, slice(24, 48), slice(72, 80))):
        wanted = np.zeros_like(result)
        wanted[top : top + SIDE, left : left + SIDE] = levels(network, pixels[top : top + SIDE, left : left + SIDE])
        assert np.abs(result - wanted)[rows, columns].max() <= 1


@pytest.mark.parametrize("words", [[], ["--set", "crop=0"]])
@pytest.mark.parametrize("kind", NETWORKS)
def test_evaluate_produces_the_same_images_as_apply(
    kind: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    import_network(kind)
    for name in ("rows", "inputs", "targets"):
        Path(name).mkdir()
    for number, size in enumerate([(SIDE, SIDE), (80, 48), (20, 24)]):
        pixels = random_image(2 * size[0], size[1])
        for name, part in (("rows", slice(None)), ("inputs", slice(size[0])), ("targets", slice(size[0], None))):
            Image.fromarray(pixels[:, part]).save(f"{name}/{number}.png")
    device = ["--accelerator", "cpu"]
    assert run(["apply", "ours.safetensors", "inputs", "--out", "made", *device]) == 0
    assert run(["measure", "made", "targets", "--json", "measured.json"]) == 0
    measured = json.loads(Path("measured.json").read_text())["metrics"]
    capsys.readouterr()
    assert run(["evaluate", "ours.safetensors", "--data-root", "rows", *device, *words]) == 0
    printed = capsys.readouterr().out
    lines = dict(line.split() for line in printed.splitlines() if line.startswith("  "))
    assert float(lines["psnr"]) == pytest.approx(measured["psnr[rgb]"], abs=1e-3)
    assert float(lines["ssim"]) == pytest.approx(measured["ssim[rgb]"], abs=1e-4)


def test_evaluate_produces_the_same_upscaled_images_as_apply(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["scale=2", "num_blocks=1", "width=4", "norm=batch", "batchnorm=instance", f"crop={SIDE}"]
    write_random_weights(Path("upscaler.safetensors"), "super_resolution", settings)
    Path("photos").mkdir()
    for number, size in enumerate([(SIDE, SIDE), (90, 48)]):
        Image.fromarray(random_image(*size)).save(f"photos/{number}.png")
    Path("small").mkdir()
    for photo in Path("photos").iterdir():
        with Image.open(photo) as image:
            small = image.resize((image.width // 2, image.height // 2), Image.Resampling.BICUBIC)
            small.save(f"small/{photo.name}")
    device = ["--accelerator", "cpu"]
    assert run(["apply", "upscaler.safetensors", "small", "--out", "made", *device]) == 0
    assert run(["measure", "made", "photos", "--protocol", "y", "--border", "2", "--json", "measured.json"]) == 0
    measured = json.loads(Path("measured.json").read_text())["metrics"]
    capsys.readouterr()
    assert run(["evaluate", "upscaler.safetensors", "--data-root", "photos", *device]) == 0
    evaluated = capsys.readouterr().out
    for name in ("psnr[y]", "ssim[y]"):
        (metric,) = [line.split()[-1] for line in evaluated.splitlines() if line.startswith(f"  {name} ")]
        assert measured[name] == pytest.approx(float(metric), abs=1e-3)


def test_evaluate_supports_the_flag_that_its_error_about_an_unreadable_image_suggests(
    capsys, rejected: Callable[..., str]
) -> None:
    write_random_weights(Path("small.safetensors"), "super_resolution", ["scale=2", "num_blocks=1", "width=4"])
    Path("some").mkdir()
    Image.fromarray(random_image(SIDE, SIDE)).save("some/good.png")
    Path("some/bad.png").write_text("no image")
    words = ["evaluate", "small.safetensors", "--data-root", "some", "--accelerator", "cpu"]
    error, flag = rejected(*words), ["--bad-images", "skip"]
    assert "bad.png" in error and " ".join(flag) in error and run([*words, *flag]) == 0
    printed = capsys.readouterr().out
    assert "bad.png" in printed and "1 sample" in printed


@can_export
def test_an_exported_network_normalises_each_image_separately() -> None:
    import onnxruntime

    network, pixels = import_network("resnet_6"), random_image(SIDE, SIDE)
    assert run(["export", "ours.safetensors", "--out", "model.onnx"]) == 0
    session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    inputs = (pixels.transpose(2, 0, 1)[None] / 127.5 - 1).astype(np.float32)
    made = (session.run(None, {"images": inputs})[0][0].transpose(1, 2, 0) + 1) * 127.5
    assert np.abs(made - levels(network, pixels)).max() < 1
