"""Public names are imported without torch and suffice for plugins; their reprs are short; they have types."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import GenericAlias

import numpy as np
import pytest
import torch

import paceline
from paceline.inference.trained import read_stored
from paceline.runs.checkpoint import choose_checkpoint
from paceline.runs.folder import RunFolder
from paceline.runs.weights import write_weights

# Public names


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import paceline, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_only_the_public_names_are_visible_and_each_can_be_imported() -> None:
    assert dir(paceline) == sorted(paceline.__all__)
    assert all(getattr(paceline, name) is not None for name in paceline.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        paceline.trian  # noqa: B018


def test_a_star_import_imports_exactly_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from paceline import *", names)
    assert names.keys() - {"__builtins__"} == set(paceline.__all__)
    assert re.fullmatch(r"\d+\.\d+\.\d+", paceline.__version__)


def public_methods() -> Iterator[tuple[str, str]]:
    """Yield the name and docstring of every public object and of every public method defined in Paceline."""
    for name in paceline.__all__:
        value = getattr(paceline, name)
        if isinstance(value, GenericAlias):
            continue
        yield name, value.__doc__ or ""
        for base in value.__mro__ if inspect.isclass(value) else ():
            for member, found in vars(base).items() if base.__module__.startswith("paceline.") else ():
                function = found.__func__ if isinstance(found, classmethod) else found
                if member[0] != "_" and (inspect.isfunction(function) or isinstance(function, property)):
                    yield f"{name}.{member}", inspect.getdoc(getattr(value, member)) or ""


@pytest.mark.parametrize(("name", "docstring"), [pytest.param(*one, id=one[0]) for one in public_methods()])
def test_a_docstring_starts_with_one_short_sentence(name: str, docstring: str) -> None:
    first, _, rest = docstring.partition("\n")
    assert first.endswith(".") and len(first) < 80 and not rest.split("\n")[0].strip(), docstring


def test_a_recipe_and_source_that_use_only_public_names_can_be_trained_and_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("stripes.py").write_text(
        "import numpy as np\n"
        "from paceline import ArraySource, DataSpec\n\n\n"
        "class Stripes(ArraySource):\n"
        "    def __init__(self, split, settings):\n"
        "        labels = np.arange(64) % 2\n"
        "        images = np.zeros((64, 8, 8, 1), np.uint8)\n"
        "        images[labels == 0, ::2] = 255\n"
        "        images[labels == 1, :, ::2] = 255\n"
        "        super().__init__({'image': images, 'label': labels}, DataSpec(1, 8, 8, num_classes=2))\n"
    )
    result = paceline.train(
        "classification", data="./stripes.py", width=8, images=256, batch_size="16", accelerator="cpu", out="run"
    )
    assert isinstance(result, paceline.TrainResult) and result.exit_code == 0 and result.images == 256
    assert result.metrics["test/top1"] == 100.0
    model = paceline.load(result.folder, device="cpu")
    assert isinstance(model, paceline.Model)
    image = np.zeros((1, 1, 8, 8), np.uint8)
    image[:, :, ::2] = 255
    assert model.predict(image).argmax(dim=1).tolist() == [0]


def test_train_raises_the_same_error_that_the_command_prints() -> None:
    with pytest.raises(paceline.UserError, match="unknown recipe 'clasification'; did you mean 'classification'"):
        paceline.train("clasification")


def test_the_api_reference_lists_every_public_name() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "python.md").read_text()
    assert sorted(re.findall(r"^::: paceline\.(\w+)$", page, re.MULTILINE)) == sorted(paceline.__all__)


# Reprs


SAME = paceline.Difference("ddp", "weights", "generator", 2.2e-16, 1e-9, "")
OTHER = paceline.Difference("fsdp", "gradients of penalty", "discriminator", 0.25, 1e-12, "main.0.weight")


def test_the_repr_of_a_training_result_shows_the_metrics_from_the_last_evaluation() -> None:
    tested = {"classifier/cross_entropy": 0.1, "validation/top1": 97.2, "test/top1": 98.3333, "test/count": 359.0}
    tested["test/checkpoint_images"] = 14_370.0
    generated = {"train/FID[pixels-8x8]": 8.5348, "time/images_per_second": 72.7}
    for result, shown in (
        (("first", 14_370, 0, tested), "'runs/first', images=14370, test/top1=98.33"),
        (("gan", 32, 130, generated), "'runs/gan', images=32, exit_code=130, train/FID[pixels-8x8]=8.535"),
        (("lost", 0, 1, {}), "'runs/lost', images=0, exit_code=1"),
    ):
        training = paceline.TrainResult(Path("runs") / result[0], *result[1:])
        assert repr(training) == f"TrainResult(folder={shown})" and training.ok == (result[2] == 0)


def test_the_repr_of_a_difference_shows_whether_it_is_within_the_tolerance() -> None:
    assert repr(SAME) == "Difference(ddp, weights of generator, 2.2e-16, ok)"
    assert repr(OTHER) == (
        "Difference(fsdp, gradients of penalty in discriminator, 2.5e-01, above 1e-12 in main.0.weight)"
    )


def test_a_verify_result_is_true_if_every_difference_is_within_its_tolerance() -> None:
    good, bad = paceline.VerifyResult((SAME, SAME)), paceline.VerifyResult((SAME, OTHER))
    assert good and good.ok and not bad and not bad.ok
    assert repr(good) == "VerifyResult(ok, 2 differences, largest 2.2e-16)"
    assert repr(bad) == f"VerifyResult(1 of 2 differences above tolerance, first {OTHER})"


def test_the_repr_of_a_data_spec_omits_default_values() -> None:
    names = tuple(f"class {number}" for number in range(1000))
    spec = paceline.DataSpec(3, 224, 224, num_classes=1000, class_names=names)
    assert repr(spec) == (
        "DataSpec(channels=3, height=224, width=224, num_classes=1000, "
        "class_names=('class 0', 'class 1', 'class 2', ...))"
    )


def test_the_repr_of_settings_omits_default_values() -> None:
    assert repr(paceline.RunSettings()) == "RunSettings()"
    folder = "/data/" + "deep/" * 12
    assert repr(paceline.RunSettings(data_root=folder, seed=1)) == f"RunSettings(data_root={folder!r}, seed=1)"


def test_the_repr_of_a_loss_shows_values_and_shapes() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = paceline.Loss({"real": weight.sum() / 3}, signals={"balance": torch.tensor(0.123456)})
    assert repr(loss) == "Loss(terms={'real': 1}, signals={'balance': 0.1235})"
    assert repr(paceline.Loss({}, shared={"fake": torch.zeros(2, 1, 8, 8)})) == (
        "Loss(terms={}, shared={'fake': [2, 1, 8, 8]})"
    )


def test_the_repr_of_a_source_shows_how_many_samples_it_has() -> None:
    arrays = {"image": np.zeros((1200, 8, 9, 3), np.uint8)}
    source = paceline.ArraySource(arrays, paceline.DataSpec(3, 8, 9, num_classes=10))
    assert repr(source) == "ArraySource(1,200 samples, 3×8×9, 10 classes)"
    assert repr(paceline.ArraySource(arrays, paceline.DataSpec(3, 8, 9))) == "ArraySource(1,200 samples, 3×8×9)"


def test_the_repr_of_a_model_shows_its_recipe_and_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: str
) -> None:
    monkeypatch.chdir(tmp_path)
    paceline.train(tiny, images=160, loggers="", accelerator="cpu", out="run")
    best = choose_checkpoint(RunFolder(Path("run")).checkpoints, "best").images
    assert repr(paceline.load("run", device="cpu")) == f"Model({tiny}, 'run', best checkpoint at {best} images, cpu)"
    assert repr(paceline.load(Path("run"), 160, "cpu")) == f"Model({tiny}, 'run', checkpoint at 160 images, cpu)"

    stored = read_stored("run")
    write_weights(Path("tiny.safetensors"), stored.config, stored.spec, stored.weights)
    assert repr(paceline.load("tiny.safetensors", device="cpu")) == f"Model({tiny}, 'tiny.safetensors', cpu)"


# Types


ROOT = Path(__file__).resolve().parents[2]


def test_the_package_is_marked_as_typed() -> None:
    assert (Path(paceline.__file__).parent / "py.typed").is_file()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert "py.typed" in project["setuptools"]["package-data"]["paceline"]
    assert "tests/api/typed_use.py" in project["mypy"]["files"], "`make lint` would not check it"


@pytest.mark.slow
def test_a_users_program_passes_mypy_in_strict_mode(tmp_path: Path) -> None:
    """Run mypy without the project's configuration. `make lint` checks the same file with that configuration."""
    program = tmp_path / "program.py"
    program.write_text(Path(__file__).with_name("typed_use.py").read_text())
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--config-file=", program.name]
    environment = os.environ | {"MYPYPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
