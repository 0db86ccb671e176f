"""`paceline` exports the public API without importing torch, and plugins need no other names."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import GenericAlias

import numpy as np
import pytest

import paceline


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
