"""Every public name has an example in its docstring, and every example runs."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import GenericAlias
from typing import Any

import pytest

import paceline

ROOT = Path(__file__).resolve().parents[2]
METHODS = [name for name, value in vars(paceline.Model).items() if inspect.isfunction(value) and name[0] != "_"]
NAMES = [*paceline.__all__, *(f"Model.{name}" for name in METHODS)]
MODULES = {name: module for module, names in paceline._MODULES.items() for name in names}
FILE = re.compile(r"^( *)```python\n\1(# (\w+\.py)\n.*?)^\1```$", re.DOTALL | re.MULTILINE)


def docstring(name: str) -> str:
    value: Any = paceline
    for part in name.split("."):
        value = getattr(value, part)
    if isinstance(value, GenericAlias):  # a generic alias inherits dict's docstring
        return _docstring_below(name)
    return inspect.cleandoc(value.__doc__ or "")


def _docstring_below(name: str) -> str:
    """Return the string below an assignment, which editors and the API reference show as its docstring."""
    source = importlib.import_module(MODULES[name]).__file__
    body = ast.parse(Path(source).read_text(encoding="utf-8")).body
    for statement, below in pairwise(body):
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name:
            assert isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            return inspect.cleandoc(below.value.value)
    return ""


class CallsMayPrint(doctest.OutputChecker):
    """An output checker that accepts any output if the example shows none, because training prints its progress."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the runs and files that the examples use."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "docs").symlink_to(ROOT / "docs")
    for name in NAMES:
        for _, text, file in FILE.findall(docstring(name)):
            (folder / file).write_text(inspect.cleandoc(text) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        paceline.train("classification", preset="quick", epochs=1, out="runs/first")
        small = {"ngf": 2, "ndf": 2, "nz": 4, "generated_images": 128}
        paceline.train("dcgan", images=16, batch_size=16, loggers="", **small)
        small = {"crop": 16, "depth": 1, "width": 2}
        photos = "docs/examples/photos"
        paceline.train("restoration", data="degraded", data_root=photos, images=2, batch_size=2, loggers="", **small)
        yield folder
    sys.modules.pop("my_recipe", None)  # another example may have imported this module


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_an_example(name: str) -> None:
    assert doctest.DocTestParser().get_examples(docstring(name)), f"paceline.{name} needs an 'Examples:' section"


@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs(place: Path, name: str) -> None:
    example = doctest.DocTestParser().get_doctest(docstring(name), {"paceline": paceline}, name, None, None)
    report: list[str] = []
    failed = doctest.DocTestRunner(CallsMayPrint(), verbose=False, optionflags=doctest.ELLIPSIS)
    failed.run(example, out=report.append)
    assert not failed.failures, "".join(report)
