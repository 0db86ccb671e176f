"""A sample user program. mypy checks that the public API has the types that the program expects.

`make lint` runs mypy on this file with the project's configuration, and test_types.py runs mypy without it.
The program itself is never executed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, assert_type

import torch
from PIL import Image
from torch import Tensor, nn

import paceline
from paceline import Batch, DataSpec, Difference, Draw, Evaluation, Loss, Phase, Recipe, setting


def use() -> None:
    result = paceline.train(
        "classification", data=Path("my_source.py"), epochs=1, batch_size="32/device", devices=2, precision="bf16"
    )
    assert_type(result, paceline.TrainResult)
    assert_type(result.folder, Path)
    assert_type(result.images, int)
    assert_type(result.exit_code, int)
    assert_type(result.ok, bool)
    assert_type(result.metrics, dict[str, float])
    paceline.train("dcgan", nz=100, discriminator={"lr": 4e-4}, epochs=None)

    model = paceline.load(result.folder, checkpoint=1_000, device=torch.device("cpu"))
    assert_type(model, paceline.Model)
    assert_type(model.predict(Image.new("L", (8, 8))), Tensor)
    assert_type(model.predict(torch.zeros(1, 1, 8, 8, dtype=torch.uint8)), Tensor)
    assert_type(model.sample(16, seed=1), Tensor)
    assert_type(model.apply(Image.new("RGB", (8, 8))), dict[str, Image.Image])
    assert_type(model.classes, tuple[str, ...])
    assert_type(model.networks, dict[str, nn.Module])
    assert_type(model.spec, DataSpec)
    assert_type(model.recipe, Recipe)
    assert_type(model.device, torch.device)
    assert_type(model.origin, str)

    verified = paceline.verify("classification", ["single", "ddp"], steps=2, seed=1)
    assert_type(verified, paceline.VerifyResult)
    assert_type(verified.ok, bool)
    assert_type(verified.differences, tuple[Difference, ...])
    assert_type(verified.differences[0].value, float)
    assert_type(paceline.__version__, str)


def misuse() -> None:
    """Use the API incorrectly. mypy reports unused `type: ignore` comments, so each line here must be a type error."""
    paceline.train("dcgan", devices="two")  # type: ignore[arg-type]
    paceline.train("dcgan", precision="fp8")  # type: ignore[arg-type]
    paceline.train("dcgan", "digits")  # type: ignore[call-arg]
    paceline.verify("dcgan", steps=0.5)  # type: ignore[arg-type]
    paceline.load(3)  # type: ignore[arg-type]
    paceline.trian("dcgan")  # type: ignore[attr-defined]


@dataclass(frozen=True)
class ClassifierSettings:
    """Settings for the recipe `Classifier`."""

    width: int = setting(32, "channels of the first layer", at_least=1)
    activation: Literal["relu", "silu"] = setting("relu", "activation")


class Classifier(Recipe):
    """A recipe with type annotations."""

    Settings = ClassifierSettings
    defaults = {"data": "digits", "batch_size": 64, "classifier": {"lr": 1e-3}}
    evaluation = Evaluation("accuracy", best="validation/top1", mode="max")
    phases = (Phase("classifier", network="classifier"),)

    def __init__(self, settings: ClassifierSettings, spec: DataSpec) -> None:
        super().__init__(settings, spec)
        self.draws = {"noise": Draw((8,))}
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(spec.height * spec.width, spec.num_classes))

    def classifier_loss(self, batch: Batch) -> Loss:
        assert_type(batch["image"], Tensor)
        return Loss({"cross_entropy": nn.functional.cross_entropy(self.classifier(batch["image"]), batch["label"])})

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        return {"logits": self.classifier(batch["image"])}
