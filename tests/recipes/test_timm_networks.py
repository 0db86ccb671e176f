"""Classification with networks from timm: training, weights from files, use of the model, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from running import run_fork
from safetensors.torch import save_file

import paceline
from paceline.cli.app import run
from paceline.commands.configure import configure
from paceline.commands.verify import differences
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.models.torch_file import read_state_dict
from paceline.recipes.classification import Classification, ClassificationSettings
from paceline.training.build import assemble

timm = pytest.importorskip("timm")
pytestmark = pytest.mark.extras

NETWORKS: dict[str, dict[str, Any]] = {
    "convnext_tiny": {"depths": [1, 1, 1, 1], "dims": [8, 8, 16, 16]},
    "vit_tiny_patch16_224": {"depth": 2, "embed_dim": 24, "num_heads": 3, "patch_size": 8},
    "mobilenetv3_small_050": {"drop_rate": 0.0},  # its BatchNorm layers contain the activations
}
SMALL = {**NETWORKS["convnext_tiny"], "drop_path_rate": 0.0}
SPEC = DataSpec(3, 32, 32, num_classes=10)


def build(name: str, spec: DataSpec = SPEC, **arguments: Any) -> Classification:
    torch.manual_seed(0)
    return Classification(ClassificationSettings(network=f"timm:{name}", network_args=arguments), spec)  # type: ignore[arg-type]


def words(name: str, arguments: dict[str, Any]) -> list[str]:
    pairs = {
        "network": f"timm:{name}",
        **{f"network_args.{key}": json.dumps(value) for key, value in arguments.items()},
    }
    return [word for key, value in pairs.items() for word in ("--set", f"{key}={value}")]


def their_file(folder: Path, num_classes: int, in_chans: int = 3, name: str = "theirs.safetensors") -> Path:
    """Write the weights of a small ConvNeXt as a user of timm would, and return the path."""
    torch.manual_seed(1)
    network = timm.create_model("convnext_tiny", num_classes=num_classes, in_chans=in_chans, **SMALL)
    path = folder / name
    if path.suffix == ".safetensors":
        save_file(network.state_dict(), path)
    else:
        torch.save({"state_dict": network.state_dict()}, path)
    return path


@pytest.mark.parametrize("name", NETWORKS)
def test_two_processes_train_the_same_weights_as_one(name: str) -> None:
    settings = {"network": f"timm:{name}", "network_args": NETWORKS[name], "size": 32, "batch_size": "8", "devices": 2}
    augment = {"mixup": 0.8, "cutmix": 1.0, "trivial_augment": True, "accelerator": "cpu", "data": "digits"}
    # AdamW divides by the size of the gradient. With BatchNorm, some gradients are zero except for rounding errors.
    optimizer = "sgd" if name.startswith("mobilenet") else "adamw"
    modern = {"optimizer": optimizer, "weight_decay": 0.05, "layer_decay": 0.75, "lr": 1e-3, "warmup": "0 images"}
    config = configure("classification", {**settings, **augment, **modern})
    found = differences(config, ["single", "ddp"], steps=3, tolerance=1e-9)
    assert found and all(one.value <= 1e-9 for one in found), found


def test_the_data_determines_classes_channels_and_image_size() -> None:
    recipe = build("vit_tiny_patch16_224", DataSpec(1, 24, 16, num_classes=7), **NETWORKS["vit_tiny_patch16_224"])
    logits = recipe.eval().predict({"image": torch.zeros(2, 1, 24, 16)})["logits"]
    assert logits.shape == (2, 7) and recipe.classifier.pos_embed.shape[1] == 1 + 3 * 2  # type: ignore[union-attr,index]


def test_images_are_normalised_as_in_timm() -> None:
    recipe = build("convnext_tiny", **SMALL).eval()
    images = torch.rand(2, 3, 32, 32)
    config = recipe.classifier.pretrained_cfg
    mean, std = (torch.tensor(config[key])[:, None, None] for key in ("mean", "std"))  # type: ignore[index]
    expected = recipe.classifier((images - mean) / std)
    assert torch.allclose(recipe.predict({"image": images * 2 - 1})["logits"], expected, atol=1e-5)


def test_layer_decay_uses_the_blocks_of_the_network() -> None:
    flags = {"network": "timm:vit_tiny_patch16_224", "network_args": NETWORKS["vit_tiny_patch16_224"], "size": 16}
    parts = assemble(configure("classification", {**flags, "layer_decay": 0.5, "accelerator": "cpu"}))
    learner = parts.step.learners["classifier"]
    rates = {id(p): group["relative_rate"] for group in learner.optimizer.param_groups for p in group["params"]}
    of = {name: rates[id(parameter)] for name, parameter in learner.named.items()}
    assert of["head.weight"] == 1 > of["blocks.1.attn.qkv.weight"] > of["blocks.0.attn.qkv.weight"] > of["pos_embed"]


BAD_INPUT: list[tuple[str, dict[str, Any], str]] = [
    ("convnext_tny", {}, r"timm has no network of this name; did you mean .*timm:convnext_tiny"),
    ("local-dir:/etc", {}, "no network of this name"),
    ("convnext_tiny.nothing", {}, "no weights 'nothing'"),
    ("convnext_tiny", {"drop_pth_rate": 0.1}, "cannot be built with network_args drop_pth_rate=0.1 .*unexpected keyw"),
    ("convnext_tiny", {"depths": "many"}, "cannot be built with network_args depths=many"),
    ("convnext_tiny", {"checkpoint_path": "x.pth"}, r"network_args\.checkpoint_path: cannot be set; use --init-from"),
    ("convnext_tiny", {"num_classes": 3}, "the data determines it"),
    ("convnext_tiny", {"pretrained": "yes"}, "expected true or false"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), BAD_INPUT)
def test_bad_names_and_arguments_are_rejected_in_one_line(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        build(name, **arguments)
    assert "\n" not in str(caught.value)


def test_images_below_the_stride_of_the_network_are_rejected() -> None:
    with pytest.raises(UserError, match=r"cannot process images of 8×8 pixels"):
        build("convnext_tiny", DataSpec(3, 8, 8, num_classes=2), **SMALL)


def test_a_transformer_rejects_images_that_differ_from_the_training_size_unless_sizes_are_dynamic() -> None:
    arguments = NETWORKS["vit_tiny_patch16_224"]
    larger = {"image": torch.zeros(1, 3, 64, 64, dtype=torch.float64)}
    with pytest.raises(UserError, match=r"cannot process images of 64×64 pixels"):
        build("vit_tiny_patch16_224", **arguments).double().eval().predict(larger)
    dynamic = build("vit_tiny_patch16_224", dynamic_img_size=True, **arguments).double().eval()
    assert dynamic.predict(larger)["logits"].shape == (1, 10)


def test_published_weights_are_read_only_when_a_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = build("convnext_tiny", pretrained=True, **SMALL)  # does not use the network
    assert recipe.weights.published

    create = timm.create_model

    def offline(*names: str, pretrained: bool = False, **arguments: Any) -> Any:
        if pretrained:
            raise OSError("no route to host")
        return create(*names, **arguments)

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(UserError, match=r"cannot be downloaded.*no route to host") as caught:
        recipe.pretrained_weights(None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["theirs.safetensors", "theirs.pth"])
def test_a_run_starts_from_a_file_that_timm_wrote(name: str, tmp_path: Path) -> None:
    file = their_file(tmp_path, num_classes=5, in_chans=3, name=name)
    their = read_state_dict(file)
    adopted = build("convnext_tiny", **SMALL).pretrained_weights(their)
    assert torch.equal(adopted["classifier.stem.0.weight"], their["stem.0.weight"])
    assert adopted["classifier.head.fc.weight"].shape == (10, 16)  # new, since the number of classes differs
    same = build("convnext_tiny", DataSpec(3, 32, 32, num_classes=5), **SMALL).pretrained_weights(their)
    assert torch.equal(same["classifier.head.fc.weight"], their["head.fc.weight"])


@pytest.mark.parametrize("num_classes", [10, 5])
def test_weights_of_another_architecture_are_rejected(num_classes: int) -> None:
    other = timm.create_model("resnet18", num_classes=num_classes).state_dict()
    with pytest.raises(UserError, match="the weights belong to a different network") as caught:
        build("convnext_tiny", **SMALL).pretrained_weights(other)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of a small ConvNeXt, fine-tuned from a file that timm wrote."""
    folder = tmp_path_factory.mktemp("timm")
    their_file(folder, num_classes=5, in_chans=1)
    command = ["train", "classification", "--preset", "finetune", "--data", "digits", "--set", "size=32"]
    command += ["--images", "64", "--batch-size", "32", "--accelerator", "cpu", "--init-from", "theirs.safetensors"]
    started = run_fork(folder, *command, *words("convnext_tiny", SMALL), "--out", "run")
    assert started.wait() == 0, started.stdout + started.stderr
    assert "initialised from theirs.safetensors: classifier" in started.stdout
    again = run_fork(folder, *command, *words("convnext_tiny", SMALL), "--out", "run")
    assert again.wait() == 0 and "already finished" in again.stdout
    changed = run_fork(folder, *command, *words("convnext_tiny", {**SMALL, "drop_path_rate": 0.1}), "--out", "run")
    assert changed.wait() == 2 and "network_args.drop_path_rate: 0.0 → 0.1" in changed.stderr
    return folder


def test_a_trained_network_predicts_and_evaluates_without_the_initial_file(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained)
    (trained / "theirs.safetensors").rename(trained / "moved.safetensors")
    Image.new("L", (32, 32), 90).save("image.png")
    weights = str(next(Path("run/checkpoints").glob("*/weights.safetensors")))
    for model in ("run", weights):
        assert run(["predict", model, "image.png", "--accelerator", "cpu"]) == 0
        assert run(["evaluate", model, "--data", "digits", "--accelerator", "cpu"]) == 0
    assert paceline.load(weights).predict(Image.open("image.png")).shape == (1, 10)
    (trained / "moved.safetensors").rename(trained / "theirs.safetensors")


def test_a_trained_network_is_exported_to_onnx(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxscript")
    monkeypatch.chdir(trained)
    assert run(["export", "run", "--out", "model.onnx"]) == 0


def test_an_imported_file_classifies_like_timm(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained)
    file = their_file(trained, num_classes=4, name="rgb.pth")
    imported = ["import", str(file), "--recipe", "classification", "--out", "ours.safetensors", "--set", "size=32"]
    assert run([*imported, *words("convnext_tiny", SMALL)]) == 0
    pixels = torch.randint(256, (32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    network = timm.create_model("convnext_tiny", num_classes=4, **SMALL).eval()
    network.load_state_dict(torch.load(file, weights_only=True)["state_dict"])
    mean, std = (torch.tensor(network.pretrained_cfg[key])[:, None, None] for key in ("mean", "std"))
    with torch.no_grad():
        expected = network(((pixels.permute(2, 0, 1) / 255 - mean) / std)[None]).softmax(1)
    found = paceline.load("ours.safetensors").predict(Image.fromarray(pixels.numpy()))
    assert torch.allclose(found, expected.double(), atol=1e-5)


def test_import_needs_the_name_of_the_network(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(trained)
    assert run(["import", "theirs.safetensors", "--recipe", "classification", "--out", "x.safetensors"]) == 2
    assert "use --set network=timm:NAME" in capsys.readouterr().err
