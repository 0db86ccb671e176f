"""The layout holds: arrows between modules go down only, files stay short, and no text names one machine."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "paceline"

LAYERS = (  # from the top; a package imports from the layers below its own
    {"paceline", "__main__"},
    {"cli"},
    {"commands"},
    {"compare"},
    {"report", "benchmarking", "inference"},
    {"launch"},
    {"training", "board"},
    {"runs"},
    {"evaluation"},
    {"data", "parallel", "recipes"},
    {"models"},
    {"images"},
    {"config"},
    {"contracts"},
    {"core"},
)
DEPTH = {unit: depth for depth, layer in enumerate(LAYERS) for unit in layer}
SINGLE_DEVICE = {"models", "recipes"}  # these know nothing of processes
MAX_LINES = 300


class Import(NamedTuple):
    """One imported module or name, and where."""

    file: str
    line: int
    unit: str  # the importing unit: the first name under `paceline`
    target: str  # what is imported, with dots

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.unit} → {self.target}"

    @property
    def target_unit(self) -> str | None:
        """The unit that the import points to; None outside of the package and for the version."""
        first, _, rest = self.target.partition(".")
        if first != "paceline" or rest == "__version__":
            return None
        unit = rest.split(".")[0]
        return unit if unit in DEPTH else "paceline"


def imports(package: Path) -> Iterator[Import]:
    """Every import in a package, those inside functions and `import_module("…")` too."""
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package)
        unit = "paceline" if path.parts == ("__init__.py",) else path.with_suffix("").parts[0]
        parents = ["paceline", *path.parts[:-1]]  # what `from .` means in this file
        for node in ast.walk(ast.parse(file.read_text(), str(file))):
            for target in _targets(node, parents):
                yield Import(f"{package.name}/{path.as_posix()}", node.lineno, unit, target)


def _targets(node: ast.AST, parents: list[str]) -> list[str]:
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom():
            base = parents[: len(parents) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            return [f"{origin}.{alias.name}" for alias in node.names]
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            return [name]
    return []


def upward(found: list[Import]) -> list[str]:
    """The arrows that the layout forbids, one line each."""
    faults = []
    for one in found:
        here, there = one.unit, one.target_unit
        if here not in DEPTH:
            faults.append(f"{one.file}: {here!r} is in no layer; add it to LAYERS in this test and to the layout")
        elif there is None or there == here:
            continue
        elif DEPTH[there] < DEPTH[here]:
            faults.append(f"{one} points up")
        elif DEPTH[there] == DEPTH[here]:
            faults.append(f"{one} points sideways: {here} and {there} do not import each other")
    return list(dict.fromkeys(faults))


def distributed(found: list[Import]) -> list[str]:
    """The imports of torch.distributed where a model or a recipe is defined, one line each."""
    return [
        str(one) for one in found if one.unit in SINGLE_DEVICE and f"{one.target}.".startswith("torch.distributed.")
    ]


def test_no_import_points_up() -> None:
    faults = upward(list(imports(PACKAGE)))
    assert not faults, "\n".join(["imports against the layout:", *faults])


def test_models_and_recipes_do_not_know_processes() -> None:
    faults = distributed(list(imports(PACKAGE)))
    assert not faults, "\n".join(["torch.distributed belongs in parallel/:", *faults])


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        ("models/net.py", "import paceline.training.loop", "1: models → paceline.training.loop points up"),
        ("data/a.py", "def f():\n    from paceline import commands", "2: data → paceline.commands points up"),
        ("config.py", "from .data.tickets import part", "1: config → paceline.data.tickets.part points up"),
        ("data/a/b.py", "from ...cli import main", "1: data → paceline.cli.main points up"),
        ("data/__init__.py", "from ..training import loop", "1: data → paceline.training.loop points up"),
        ("training/a.py", "from paceline import train", "1: training → paceline.train points up"),
        ("training/a.py", "import_module('paceline.launch.x')", "1: training → paceline.launch.x points up"),
        ("recipes/a.py", "import paceline.parallel", "recipes and parallel do not import each other"),
        ("parallel/a.py", "from paceline.recipes import x", "parallel and recipes do not import each other"),
        ("helpers.py", "import os", " 'helpers' is in no layer"),
    ],
)
def test_a_forbidden_arrow_is_named_with_file_and_line(tmp_path: Path, file: str, text: str, fault: str) -> None:
    (found,) = upward(list(imports(_package(tmp_path, {file: text}))))
    assert found.startswith(f"paceline/{file}:") and fault in found


def test_arrows_down_and_within_a_package_pass(tmp_path: Path) -> None:
    package = _package(
        tmp_path,
        {
            "cli/app.py": "from paceline.commands import train\nfrom paceline import __version__",
            "commands/train.py": "from paceline.training.loop import run\nfrom paceline.models import resnet",
            "training/loop.py": "from .step import step\nfrom paceline.config import resolve",
            "data/loader.py": "from paceline.data.source import Source\nimport torch.distributed",
            "evaluation/accuracy.py": "from paceline.data import source",
            "contracts/recipe.py": "from paceline.core.errors import UserError",
        },
    )
    assert upward(list(imports(package))) == []


@pytest.mark.parametrize("text", ["import torch.distributed as dist", "from torch import distributed"])
def test_a_model_that_imports_torch_distributed_is_named(tmp_path: Path, text: str) -> None:
    (fault,) = distributed(list(imports(_package(tmp_path, {"models/net.py": text}))))
    assert fault == "paceline/models/net.py:1: models → torch.distributed"


def _package(folder: Path, files: dict[str, str]) -> Path:
    package = folder / "paceline"
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text + "\n")
    return package


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, paceline.cli.app; print(*{'torch', 'torchvision', 'lightning', 'sklearn'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.split(), (
        f"importing paceline.cli.app also imports {done.stdout.strip()}; import it in a command"
    )


def test_source_files_can_be_read_in_one_sitting() -> None:
    lengths = {file.relative_to(ROOT).as_posix(): len(file.read_text().splitlines()) for file in PACKAGE.rglob("*.py")}
    long = [f"{name}: {lines} lines" for name, lines in lengths.items() if lines > MAX_LINES]
    assert not long, "\n".join([f"longer than {MAX_LINES} lines; split by what a reader looks for:", *long])


def test_any_set_of_test_files_can_be_named_together() -> None:
    files = [file for file in (ROOT / "tests").rglob("*.py") if file.name != "conftest.py"]
    counts = Counter(file.name for file in files)
    assert not [name for name, count in counts.items() if count > 1], "two modules of one name"
    importers = [
        file.name for file in files if re.search(r"^(?:from|import) conftest\b", file.read_text(), re.MULTILINE)
    ]
    assert not importers, "folders have one each: put what tests import into a module of another name"


PRIVATE = {
    "a path of one machine": re.compile(r"(?<![\w.}])/(?:work|root|home|Users)/"),
    "a package index of one machine": re.compile(r"-{2}(?:(?:extra-)?index-url|find-links|trusted-host)\b.*[:/.]"),
    "a number of an issue": re.compile(r"(?i)\bissues?\s+#?\d+|(?<!\w)GH-\d+"),
}


def test_no_text_names_one_machine_or_an_issue() -> None:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout, so its own files cannot be told from others")
    faults = []
    for name in filter(None, listed.stdout.split("\0")):
        try:
            lines = (ROOT / name).read_text().splitlines()
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue  # a picture, or a file that was deleted and is still in the index
        for number, line in enumerate(lines, start=1):
            faults += [f"{name}:{number}: {what}" for what, pattern in PRIVATE.items() if pattern.search(line)]
    assert not faults, "\n".join(faults)
