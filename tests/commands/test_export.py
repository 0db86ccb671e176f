"""`paceline export` writes models to ONNX that compute the same results as in PyTorch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from exporting import can_export
from running import run_fork
from test_apply import TRANSLATING, write_random_weights

from paceline.cli.app import run
from paceline.commands.configure import configure
from paceline.contracts.recipe import DataSpec
from paceline.inference.trained import build, open_image_model, open_trained, read_stored
from paceline.runs.weights import write_weights

TINY_GAN = str(Path(__file__).parent.parent / "tiny_gan.py")
SPEC = DataSpec(3, 32, 32, num_classes=3, class_names=("cat", "dog", "owl"), empty_classes=(1,))
R3GAN = ("width=8", "num_blocks=1", "group_size=4", "nz=5")
GENERATORS = {
    "dcgan": ("dcgan", ("ngf=4", "nz=5")),
    "r3gan by class": ("r3gan", (*R3GAN, "conditional=on")),
}


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_weights_of(recipe: str, spec: DataSpec, *settings: str) -> str:
    """Write a weights file with the initial weights of a recipe, and return its name."""
    config = configure(recipe, {}, assignments=settings, elsewhere=True)
    write_weights(Path("written.safetensors"), config, spec, build(config, spec).state_dict())
    return "written.safetensors"


def write_generator(recipe: str, settings: tuple[str, ...]) -> str:
    config = configure(recipe, {}, assignments=settings, elsewhere=True)
    torch.manual_seed(0)
    size = 0.03 if recipe == "r3gan" else 0.1  # the images are neither uniform nor clipped to black and white
    weights = {
        name: tensor + size * torch.randn(tensor.shape).abs() if tensor.is_floating_point() else tensor
        for name, tensor in build(config, SPEC).state_dict().items()  # some initial weights are 0
    }
    write_weights(Path("random.safetensors"), config, SPEC, weights)
    return "random.safetensors"


@can_export
@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("super_resolution", ["scale=4", "num_blocks=1", "width=4", "output=residual"]),
        ("super_resolution", ["scale=2", "num_blocks=3", "width=4", "blocks=shared", "output=tanh"]),
        ("restoration", ["width=4", "depth=2"]),
        pytest.param("translation", TRANSLATING, marks=pytest.mark.slow),
    ],
)
def test_an_exported_network_computes_the_same_result_at_other_sizes(recipe, settings, capsys):
    import onnxruntime

    write_random_weights(Path("w.safetensors"), recipe, settings)
    assert run(["export", "w.safetensors", "--out", "model.onnx"]) == 0
    printed = capsys.readouterr().out
    assert "largest difference from PyTorch" in printed
    session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    image_model = open_image_model("w.safetensors")
    assert [output.name for output in session.get_outputs()] == list(image_model.results)
    images = torch.rand(3, 3, 32, 96) * 2 - 1
    with torch.no_grad():
        wanted = image_model.recipe.image_to_image(images)
    for made, name in zip(session.run(None, {"images": images.numpy()}), wanted, strict=True):
        assert np.abs(made - wanted[name].numpy()).max() < 1e-4
    assert ("any size" in printed) == (recipe == "super_resolution")
    if recipe == "super_resolution":
        small = session.run(None, {"images": np.zeros((1, 3, 5, 7), np.float32)})[0]
        assert small.shape[-1] == 7 * image_model.output_scale
    assert [path.name for path in Path.cwd().glob("model*")] == ["model.onnx"]


@can_export
@pytest.mark.parametrize("case", GENERATORS)
def test_onnx_runtime_generates_the_images_of_pytorch(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    import onnxruntime

    path = write_generator(*GENERATORS[case])
    assert run(["export", path, "--out", "model.onnx"]) == 0, capsys.readouterr().err
    by_class = case == "r3gan by class"
    printed = capsys.readouterr().out
    assert "`noise` [n, 5] (normal)" in printed and ("`class` [n] (int64, 0…2)" in printed) == by_class
    session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    recipe = open_trained(read_stored(path), path).recipe
    for count in (1, 7):
        inputs = {"noise": torch.randn(count, 5, generator=torch.Generator().manual_seed(count))}
        draws = dict(inputs)
        if by_class:
            inputs["class"] = torch.arange(count) % 3
            draws["class"] = (inputs["class"] + 0.5) / 3
        with torch.no_grad():
            wanted = recipe.predict(draws)["image"].numpy()
        (made,) = session.run(["image"], {name: tensor.numpy() for name, tensor in inputs.items()})
        assert made.shape == (count, 3, 32, 32) and np.abs(made - wanted).max() < 1e-4
        assert wanted.std() > 0.01, "the images are all the same"
    if by_class:
        metadata = session.get_modelmeta().custom_metadata_map
        assert json.loads(metadata["classes"]) == ["cat", "dog", "owl"]
        assert json.loads(metadata["empty_classes"]) == ["dog"]
        same = np.repeat(np.ones((1, 5), np.float32), 3, axis=0)
        (made,) = session.run(["image"], {"noise": same, "class": np.arange(3)})
        assert np.abs(made[0] - made[1]).max() > 0.01, "the class has no effect"


@can_export
@pytest.mark.parametrize("reading", ['batch["noise"]', '{**batch}.get("noise")'])
def test_only_the_noise_that_the_generator_reads_is_an_onnx_input(reading, tmp_path, capsys):
    import onnxruntime

    text = Path(TINY_GAN).read_text()
    assert text.count('batch["noise"]') == 1
    (tmp_path / "gan.py").write_text(text.replace('batch["noise"]', reading))
    weights = write_weights_of(str(tmp_path / "gan.py"), DataSpec(1, 8, 8))
    assert run(["export", weights, "--out", str(tmp_path / "model.onnx"), "--trust"]) == 0, capsys.readouterr().err
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    assert [one.name for one in session.get_inputs()] == ["noise"]


CONTROL_FLOW = """
from tiny import Tiny


class Branching(Tiny):
    def predict(self, batch):
        logits = super().predict(batch)["logits"]
        return {"logits": logits + 1 if float(logits.sum()) > 0 else logits}
"""


@can_export
def test_a_network_that_cannot_be_exported_is_reported_in_one_line_with_the_line_of_its_code(capsys):
    Path("branching.py").write_text(CONTROL_FLOW)
    assert run(["train", "branching.py", "--images", "32", "--accelerator", "cpu", "--out", "run"]) == 0
    capsys.readouterr()
    assert run(["export", "run", "--trust", "--out", "model.onnx"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("paceline: run: the network cannot be exported to ONNX (") and "branching.py:8): " in error
    assert not list(Path.cwd().glob("model*"))


DICE = """
from torch import nn
from paceline.contracts.recipe import Draw, Evaluation, Loss, Phase, Recipe


class Dice(Recipe):
    evaluation = Evaluation("accuracy")
    phases = (Phase("net", "net"),)

    def __init__(self, settings, spec):
        super().__init__(settings, spec)
        self.net = nn.Linear(64, 3)
        self.draws = {"spare": Draw((), "uniform"), "dice": Draw((3,), "normal")}

    def net_loss(self, batch):
        return Loss({"size": self.predict(batch)["logits"].square().mean()})

    def predict(self, batch):
        return {"logits": self.net(batch["image"].flatten(1)) + batch["dice"]}
"""


@can_export
def test_a_classifier_with_a_random_input_is_not_exported_and_the_input_is_reported(tmp_path, rejected):
    (tmp_path / "dice.py").write_text(DICE)
    weights = write_weights_of(str(tmp_path / "dice.py"), DataSpec(1, 8, 8, num_classes=3), "data=digits", "size=8")
    line = rejected("export", weights, "--out", tmp_path / "model.onnx")
    assert "Dice.predict() reads the random input 'dice', but" in line


@can_export
def test_export_rejects_a_fixed_size_classifier_that_was_trained_on_crops(tmp_path, rejected):
    (tmp_path / "flat.py").write_text(DICE.replace(' + batch["dice"]', ""))
    images, labels = np.zeros((40, 8, 8), np.uint8), np.arange(40) % 3
    np.savez(tmp_path / "few.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    words = ["train", str(tmp_path / "flat.py"), "--data", "npz", "--data-root", "few.npz", "--crop", "8"]
    words += ["--images", "32", "--batch-size", "32", "--accelerator", "cpu"]
    training = run_fork(tmp_path, *words, "--out", "run")
    assert training.wait() == 0, training.stderr
    line = rejected("export", tmp_path / "run", "--out", tmp_path / "model.onnx", "--trust")
    assert "Dice.predict() does not accept whole images of 160×128 pixels" in line


def test_export_reports_missing_packages_and_invalid_arguments(rejected, monkeypatch):
    assert "--out model.pt: expected a file name ending in .onnx" in rejected("export", "x", "--out", "model.pt")
    monkeypatch.setattr("paceline.commands.convert.PACKAGES", ("onnx", "no_such_package"))
    line = rejected("export", "nowhere", "--out", "model.onnx")
    assert "export needs " in line and "pip install 'paceline[export]'" in line
