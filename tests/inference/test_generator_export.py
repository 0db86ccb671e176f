"""An exported generator computes the same images as PyTorch, for any number of images."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.cli.app import run
from paceline.commands.configure import configure
from paceline.contracts.recipe import DataSpec
from paceline.inference.trained import build, open_trained, read_stored
from paceline.runs.weights_file import write_weights

MISSING = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
pytestmark = [pytest.mark.extras, pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")]
SPEC = DataSpec(3, 32, 32, num_classes=3, class_names=("cat", "dog", "owl"), empty_classes=(1,))
R3GAN = ("width=8", "num_blocks=1", "group_size=4", "nz=5")
CASES = {
    "dcgan": ("dcgan", ("ngf=4", "nz=5")),
    "dual_gan": ("dual_gan", ("ngf=4", "nz=5")),
    "r3gan": ("r3gan", (*R3GAN, "conditional=off")),
    "r3gan by class": ("r3gan", (*R3GAN, "conditional=on")),
}


def write_random_weights(recipe: str, settings: tuple[str, ...]) -> str:
    config = configure(recipe, {}, assignments=settings, elsewhere=True)
    torch.manual_seed(0)
    size = 0.03 if recipe == "r3gan" else 0.1  # the images are neither uniform nor clipped to black and white
    weights = {
        name: tensor + size * torch.randn(tensor.shape).abs() if tensor.is_floating_point() else tensor
        for name, tensor in build(config, SPEC).state_dict().items()  # some initial weights are 0
    }
    write_weights(Path("random.safetensors"), config, SPEC, weights)
    return "random.safetensors"


@pytest.mark.parametrize("case", CASES)
def test_onnx_runtime_generates_the_images_of_pytorch(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import onnxruntime

    monkeypatch.chdir(tmp_path)
    path = write_random_weights(*CASES[case])
    assert run(["export", path, "--out", "model.onnx"]) == 0, capsys.readouterr().err
    by_class = case == "r3gan by class"
    printed = capsys.readouterr().out
    assert "`noise` [n, 5] (normal)" in printed and ("`class` [n] (int64, 0…2)" in printed) == by_class
    session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    recipe = open_trained(read_stored(path), path).recipe
    for count in (1, 2, 7, 64):
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
