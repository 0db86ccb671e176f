"""Networks from other projects can be imported."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from photographs import photograph
from PIL import Image
from torch import Tensor, nn

import paceline
from paceline.cli.app import run
from paceline.contracts.recipe import DataSpec
from paceline.inference.trained import open_image_model
from paceline.models import networks
from paceline.models.esrgan import RRDBNet
from paceline.models.torch_file import read_state_dict
from paceline.recipes.translation import Translation, TranslationSettings

WIDTH = 6


class TheirBlock(nn.Module):
    def __init__(self, bias: bool, slopes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=bias)
        self.conv2 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=bias)
        self.bn1, self.bn2, self.prelu = nn.BatchNorm2d(WIDTH), nn.BatchNorm2d(WIDTH), nn.PReLU(slopes)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bn2(self.conv2(self.prelu(self.bn1(self.conv1(x)))))


class TheirGenerator(nn.Module):
    """A generator with layer names from other projects. If `shared`, all residual blocks are the same module."""

    def __init__(
        self, doublings: int = 2, shared: bool = True, bias: bool = True, slopes: int = 1, mixed: bool = False
    ) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, WIDTH, 9, padding=4), nn.PReLU(slopes))
        slopes = 1 if mixed else slopes
        blocks = [TheirBlock(bias, slopes)] * 4 if shared else [TheirBlock(bias, slopes) for _ in range(4)]
        self.residual = nn.Sequential(*blocks)
        self.middle = nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH))

        def up() -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(WIDTH, 4 * WIDTH, 3, padding=1), nn.PixelShuffle(2), nn.PReLU(slopes))

        self.up = nn.Sequential(*([up()] * doublings if shared else [up() for _ in range(doublings)]))
        self.last = nn.Conv2d(WIDTH, 3, 9, padding=4)
        generator = torch.Generator().manual_seed(0)
        for tensor in self.state_dict().values():
            if tensor.dtype.is_floating_point:
                tensor.uniform_(0.1, 0.3, generator=generator) if tensor.dim() == 1 else tensor.normal_(
                    0, 0.1, generator=generator
                )

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        return torch.tanh(self.last(self.up(first + self.middle(self.residual(first)))))


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


IMPORT = ["import", "--recipe", "super_resolution", "--out", "ours.safetensors"]


def import_file(*words: str) -> int:
    return run([*IMPORT, *words])


@pytest.mark.parametrize(
    "wrapped", ["plain", "under 'generator'", "with module.", "without biases", "not shared", "by Lightning"]
)
def test_an_imported_generator_generates_the_same_images(wrapped, capsys):
    theirs = TheirGenerator(shared=wrapped != "not shared", bias=wrapped != "without biases").eval()
    state: dict = theirs.state_dict()
    if wrapped in ("with module.", "under 'generator'"):
        state = {f"module.{name}": tensor for name, tensor in state.items()}
    if wrapped == "under 'generator'":
        state = {"generator": state, "generator_losses": [(0, 1.0)], "discriminator": {}}
    if wrapped == "by Lightning":
        state = {f"generator.{name}": tensor for name, tensor in state.items()}
        state = {"epoch": 3, "state_dict": {**state, "discriminator.0.weight": torch.zeros(1)}}
    torch.save(state, "theirs.pth")
    assert import_file("theirs.pth") == 0
    printed = capsys.readouterr().out
    blocks = "separate" if wrapped == "not shared" else "shared"
    assert "generator: " in printed
    assert f"recognised: scale=4, num_blocks=4, width={WIDTH}, norm=batch, blocks={blocks}, prelu=shared\n" in printed
    assert "assumed (not stored in the file): output=tanh, batchnorm=running\n" in printed
    ours = open_image_model("ours.safetensors")
    assert (ours.config.recipe.blocks == "shared") == (wrapped != "not shared")
    assert ours.output_scale == 4 and ours.config.recipe.num_blocks == 4
    images = torch.rand(1, 3, 11, 13)
    with torch.no_grad():
        wanted, made = theirs(images), ours.recipe.image_to_image(images * 2 - 1)["image"]
    assert wanted.std() > 0.01 and (made - wanted).abs().max() < 1e-5
    Image.fromarray(photograph("astronaut")[:20, :30]).save("small.png")
    assert run(["apply", "ours.safetensors", "small.png", "--out", "made", "--accelerator", "cpu"]) == 0
    with Image.open("made/small.png") as made_file:
        assert made_file.size == (120, 80)


@pytest.mark.parametrize(("shared", "mixed"), [(True, False), (False, False), (True, True)])
def test_an_imported_generator_with_one_prelu_slope_per_channel_generates_the_same_images(shared, mixed, capsys):
    theirs = TheirGenerator(shared=shared, slopes=WIDTH, mixed=mixed).eval()
    torch.save(theirs.state_dict(), "theirs.pth")
    assert import_file("theirs.pth") == 0
    assert "prelu=channel\n" in capsys.readouterr().out
    Image.fromarray(photograph("astronaut")[:20, :30]).save("small.png")
    assert run(["apply", "ours.safetensors", "small.png", "--out", "made", "--accelerator", "cpu"]) == 0
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(photograph("astronaut")[:20, :30]).permute(2, 0, 1)[None] / 255)
    levels = (wanted[0].permute(1, 2, 0).clamp(-1, 1) * 0.5 + 0.5) * 255
    with Image.open("made/small.png") as made:
        assert np.abs(np.asarray(made, float) - levels.numpy()).max() <= 1 and levels.std() > 1


def nested(state: dict, *keys: str) -> dict:
    for key in reversed(keys):
        state = {f"{key}{name}": tensor for name, tensor in state.items()} if key.endswith(".") else {key: state}
    return state


KEYS = ("params_ema", "params", "model_state_dict", "state_dict", "model", "net", "model state_dict module.")
KEYS += ("generator model_state_dict", "state_dict module. generator.", "model generator. module. _orig_mod.")


def test_a_network_is_found_under_any_common_key_or_the_only_key_of_a_checkpoint():
    state = TheirGenerator().state_dict()
    beside: dict = {"epoch": 3, "optimizer": {"state": {}}}
    files = [{**beside, **nested(state, *keys.split())} for keys in KEYS]
    ema = {"params": {key: tensor + 1 for key, tensor in state.items()}, "params_ema": state}
    for content in (*files, {"my_generator": state}, ema):
        torch.save(content, "theirs.pth")
        found = read_state_dict(Path("theirs.pth"))
        assert found.keys() == state.keys() and all(torch.equal(found[key], state[key]) for key in state)


def test_the_error_for_an_unsupported_network_lists_its_first_tensors(rejected):
    state = {f"stage{number}.weight": torch.zeros(4, 4, 3, 3) for number in range(5)}
    torch.save({"params": state}, "theirs.pth")
    line = rejected(*IMPORT, "theirs.pth")
    assert "imports only SRGAN generators" in line
    torch.save({"params": dict(list(state.items())[:4])}, "theirs.pth")
    assert "(its tensors: stage0, stage1, stage2, stage3)" in rejected(*IMPORT, "theirs.pth")


def test_imported_weights_can_start_a_run():
    torch.save(TheirGenerator(1, shared=False).state_dict(), "theirs.pth")
    assert import_file("theirs.pth") == 0
    Path("photos").mkdir()
    for number in range(8):
        Image.fromarray(photograph("astronaut")[:40, number : 40 + number]).save(f"photos/{number}.png")
    words = ["train", "super_resolution", "--data-root", "photos", "--crop", "16", "--images", "2", "--batch-size", "2"]
    settings = ("scale=2", "num_blocks=4", f"width={WIDTH}", "output=tanh")
    words += ["--lr", "0", *(word for setting in settings for word in ("--set", setting))]
    assert run([*words, "--init-from", "ours.safetensors", "--out", "run", "--accelerator", "cpu"]) == 0
    first = open_image_model("run", "last").recipe.state_dict()["generator.head.0.weight"]
    assert torch.equal(first, TheirGenerator(1, shared=False).first[0].weight)


def without(state: dict, name: str) -> dict:
    return {key: tensor for key, tensor in state.items() if key != name}


def broken_at(name: str, value: float) -> dict:
    state = TheirGenerator().state_dict()
    state[name].view(-1)[3] = value
    return state


class Surprise:
    def __reduce__(self) -> tuple:
        return (print, ("ran",))


@pytest.mark.parametrize(
    ("content", "words", "line"),
    [
        (TheirGenerator().state_dict(), ["--set", "scale=2"], "scale=2: theirs.pth has scale=4"),
        (TheirGenerator().state_dict(), ["--set", "width=64"], f"width=64: theirs.pth has width={WIDTH}"),
        (TheirGenerator(slopes=3, mixed=True).state_dict(), [], "head.1.weight has shape (3,), expected (6,)"),
        (TheirGenerator(4).state_dict(), [], "upscales by a factor of 16; supported factors are 2, 4 and 8"),
        (
            {key: value for key, value in TheirGenerator().state_dict().items() if "residual.0.bn1." not in key},
            [],
            "has 8 layers like residual.0.bn2, but expected 9",
        ),
        (without(TheirGenerator().state_dict(), "last.weight"), [], "last.bias does not belong to an SRGAN generator"),
        (nn.Linear(3, 3).state_dict(), [], "weight does not belong to an SRGAN generator"),
        ({"encoder.weight": torch.zeros(4, 3, 3, 3)}, [], "has fewer than five convolutions (its tensors: encoder)"),
        (
            {**TheirGenerator().state_dict(), "last.weight": torch.zeros(3, WIDTH, 3, 3)},
            [],
            "not an SRGAN generator: in its order, tail.weight has shape (3, 6, 3, 3), expected (3, 6, 9, 9)",
        ),
        ({"epoch": 3}, [], "'epoch' is not a tensor; expected a state_dict"),
        ([1, 2], [], "theirs.pth: contains no state_dict"),
        (None, [], "theirs.pth: no such file"),
        (b"\x80nonsense", [], "theirs.pth: "),
        (b"hi", [], "theirs.pth: was not written by torch.save"),
        (b"", [], "theirs.pth: the file is empty"),
        (nn.ReLU(), [], "theirs.pth: contains objects other than tensors, so it was not loaded"),
        (broken_at("last.weight", float("nan")), [], "theirs.pth: last.weight contains NaN or infinite values"),
        (broken_at("residual.0.bn1.running_var", float("inf")), [], "residual.0.bn1.running_var contains"),
    ],
)
def test_incompatible_weights_are_reported(content, words, line, rejected):
    if isinstance(content, bytes):
        Path("theirs.pth").write_bytes(content)
    elif content is not None:
        torch.save(content, "theirs.pth")
    assert line in rejected(*IMPORT, "theirs.pth", *words)
    assert not Path("ours.safetensors").exists()


def test_code_in_a_weights_file_does_not_run(capsys):
    Path("theirs.pth").write_bytes(pickle.dumps({"generator": Surprise()}))
    assert import_file("theirs.pth") == 2
    printed = capsys.readouterr()
    assert "ran" not in printed.out and len(printed.err.splitlines()) == 1


NETS = ["--set", "generator=resnet_6", "--set", "segmentation_generator=unet_32", "--set", "ngf=1", "--set", "crop=32"]
NETS += ["--set", "panels=image,stain,segmentation", "--set", "dropout=0", "--set", "d_layers=1"]


def write_deepliif(folder: Path, skip: str = "") -> Translation:
    """Write a one-modality model to files with the names that DeepLIIF uses."""
    settings = TranslationSettings(
        generator="resnet_6", segmentation_generator="unet_32", ngf=1, d_layers=1, dropout=0.0, batchnorm="instance"
    )
    recipe = Translation(settings, DataSpec(3, 32, 32, panels=("stain", "segmentation")))
    folder.mkdir()
    for ours, theirs in {"G1": "G1", "GS0": "G21", "GS1": "G22"}.items():
        if theirs != skip:
            torch.save(recipe.generators[ours].state_dict(), folder / f"latest_net_{theirs}.pth")
    return recipe.eval()


def test_all_deepliif_networks_are_imported_together(capsys):
    theirs = write_deepliif(Path("nets"))
    assert run(["import", "nets", "--recipe", "translation", "--out", "ours.safetensors", *NETS]) == 0
    assert "generators.G1, generators.GS0, generators.GS1" in capsys.readouterr().out
    images = torch.rand(1, 3, 40, 50) * 2 - 1
    ours = open_image_model("ours.safetensors")
    with torch.no_grad():
        wanted, made = theirs.image_to_image(images), ours.recipe.image_to_image(images)
    assert list(made) == ["stain", "segmentation"] and all(torch.equal(made[name], wanted[name]) for name in made)
    loaded = paceline.load("ours.safetensors", device="cpu").networks
    assert list(loaded) == ["generators.G1", "generators.GS0", "generators.GS1"], "the files contain no discriminators"


@pytest.mark.parametrize(
    ("skip", "words", "line"),
    [
        ("G21", NETS, "nets: 'generators.GS0.model"),
        ("", [*NETS, "--set", "ngf=2"], "G1.pth: model.1.weight has shape (1, 3, 7, 7), but has shape (2, 3, 7, 7)"),
        ("", NETS[:8], "--set panels: list the input and the generated panels"),
        ("", [*NETS, "--set", "norm=instance"], "choose its architecture with --set"),
    ],
)
def test_incompatible_deepliif_networks_are_reported(skip, words, line, rejected):
    write_deepliif(Path("nets"), skip)
    assert line in rejected("import", "nets", "--recipe", "translation", "--out", "ours.safetensors", *words)


def test_recipes_without_an_importer_and_unknown_suffixes_are_rejected(rejected):
    line = "--recipe dcgan: has no importer; recipes with an importer: classification, esrgan, "
    assert line in rejected("import", "a.pth", "--recipe", "dcgan", "--out", "ours.safetensors")
    line = "--out ours.pth: expected a file name ending in .safetensors"
    assert line in rejected("import", "a.pth", "--recipe", "super_resolution", "--out", "ours.pth")


@pytest.fixture
def without_spandrel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "is_installed", lambda package: False)


@pytest.mark.usefixtures("without_spandrel")
def test_a_generator_of_a_built_in_recipe_is_recognised_without_further_packages_and_flags(capsys):
    torch.save(TheirGenerator().state_dict(), "theirs.pth")
    assert run(["import", "theirs.pth", "--out", "ours.safetensors"]) == 0
    assert open_image_model("ours.safetensors").config.recipe_name == "super_resolution"
    torch.save(RRDBNet(num_blocks=1, width=4, growth=4).state_dict(), "esrgan.pth")
    assert run(["import", "esrgan.pth", "--out", "esrgan.safetensors"]) == 0
    assert open_image_model("esrgan.safetensors").config.recipe_name == "esrgan"


@pytest.mark.usefixtures("without_spandrel")
def test_the_error_for_an_unrecognised_network_lists_the_other_ways_to_import_it(capsys):
    torch.save({"conv1.weight": torch.zeros(4, 4, 3, 3)}, "theirs.pth")
    assert run(["import", "theirs.pth", "--out", "ours.safetensors"]) == 2
    printed = capsys.readouterr().err
    assert "theirs.pth: its network is not recognised" in printed and "--recipe classification" in printed
    assert "to recognise more networks: package spandrel is not installed" in printed


@pytest.mark.parametrize("command", ["apply", "predict", "sample", "evaluate", "export"])
def test_commands_that_get_a_file_from_another_project_suggest_to_import_it(command, capsys):
    torch.save(TheirGenerator().state_dict(), "theirs.pth")
    words = {"apply": ["x.png", "--out", "x"], "predict": ["x.png"], "export": ["--out", "x.onnx"]}.get(command, [])
    assert run([command, "theirs.pth", *words]) == 2
    assert "use paceline import theirs.pth --out FILE.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize(("recipe", "flag"), [("translation", " --recipe translation"), ("super_resolution", "")])
def test_init_from_suggests_the_command_that_imports_the_file_for_the_recipe(recipe, flag, capsys):
    torch.save({"first.weight": torch.zeros(3)}, "theirs.pth")
    assert run(["train", recipe, "--init-from", "theirs.pth", "--out", "run", "--accelerator", "cpu"]) == 2
    assert f"use paceline import theirs.pth{flag} --out FILE.safetensors" in capsys.readouterr().err


OWN_IMPORTER = """
from paceline.contracts.importer import Importer
from paceline.contracts.recipe import DataSpec
from paceline.models.torch_file import read_state_dict

class OwnFiles(Importer):
    def __init__(self, paths):
        self.state = read_state_dict(paths[0])
        self.recognised = {"width": len(self.state["first.weight"])}

    def data_spec(self, settings):
        return DataSpec(3, 8, 8)

    def tensors(self, own):
        return {f"net.0.{key.removeprefix('first.')}": tensor for key, tensor in self.state.items()}
"""
OWN_RECIPE = """
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from paceline.config.settings import setting
from paceline.contracts.recipe import Loss, Phase, Recipe, Weights

@dataclass(frozen=True)
class OwnSettings:
    width: int = setting(2, "channels of the result")

class Own(Recipe):
    Settings = OwnSettings
    weights = Weights(importer=str(Path(__file__).with_name("own_importer.py")))
    phases = (Phase("net", "net"),)

    def __init__(self, settings, spec):
        super().__init__(settings, spec)
        self.net = nn.Sequential(nn.Conv2d(spec.channels, settings.width, 3, padding=1))

    def net_loss(self, batch):
        return Loss({"zero": self.net(batch["image"]).square().mean()})

    def image_to_image(self, images):
        return {"image": self.net(images)}
"""


def test_a_user_recipe_can_name_a_file_with_its_own_importer(capsys):
    Path("own_importer.py").write_text(OWN_IMPORTER)
    Path("own_recipe.py").write_text(OWN_RECIPE)
    theirs = nn.ModuleDict({"first": nn.Conv2d(3, 3, 3, padding=1)})
    torch.save({f"module.{key}": tensor for key, tensor in theirs.state_dict().items()}, "theirs.pth")
    assert run(["import", "theirs.pth", "--recipe", "./own_recipe.py", "--out", "ours.safetensors"]) == 0
    printed = capsys.readouterr().out
    assert "net: 2 tensors, 84 values → ours.safetensors" in printed and "recognised: width=3\n" in printed
    images = torch.rand(1, 3, 5, 7)
    with torch.no_grad():
        made = open_image_model("ours.safetensors").recipe.image_to_image(images)["image"]
        assert torch.equal(made, theirs["first"](images))
