"""Rules for the source tree: the direction of imports, access to plugins, and forbidden text."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from paceline.core.registry import KINDS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "paceline"
LAYERS = (  # from top to bottom; a package may import only from lower layers
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
TEMPLATES = "commands/templates"  # recipe templates for users, exempt from the import rules
MAY_NAME_ANY_PACKAGE = "core/registry.py"  # this file lists the plugin folders
NOT_A_PLUGIN = ("models/gan_augmentation.py", "translation")  # the paper's name for a shift
MODULE = re.compile(r"(?:.*-m )?(paceline(?:\.\w+)+)")
PLUGINS = {  # the names of the plugins in each plugin folder
    kind.package: {
        file.stem
        for file in PACKAGE.joinpath(*kind.package.split(".")[1:]).glob("*.py")
        if not file.stem.startswith("_")
    }
    for kind in KINDS.values()
}


class Import(NamedTuple):
    """An imported module or name, or a module named in a string, and the file that names it."""

    file: str
    package: str  # dotted name of the package that contains the file
    line: int
    target: str

    @property
    def units(self) -> tuple[str, str]:
        """The packages or modules directly under `paceline` that contain the file and what it imports."""
        here = "paceline" if self.file == "__init__.py" else self.file.split("/")[0].removesuffix(".py")
        there = self.target.split(".")[1] if "." in self.target else "paceline"
        return here, there if there in DEPTH else "paceline"

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.target}"


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of each file, by its path in the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(TEMPLATES):
            found[name] = ast.parse(path.read_text())
    return found


@cache
def imports() -> list[Import]:
    """Return all imports of Paceline's own modules and torch's, including those inside functions and in strings."""
    found = []
    for file, tree in trees().items():
        package = ".".join(["paceline", *file.split("/")[:-1]])
        docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            targets: list[str] = []
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{file}:{node.lineno}: a relative import"
                targets = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
                named = MODULE.fullmatch(node.value.rstrip("."))
                targets = [named[1]] if named and named[1].split(".")[1] in DEPTH else []
            found += [Import(file, package, getattr(node, "lineno", 0), target) for target in targets]
    return [one for one in found if one.target.split(".")[0] in ("paceline", "torch")]


def ours() -> list[Import]:
    return [one for one in imports() if one.target.startswith("paceline.") and not one.target.endswith(".__version__")]


def test_no_package_imports_from_a_higher_layer() -> None:
    problems = []
    for one in ours():
        here, there = one.units
        assert here in DEPTH, f"{one.file}: {here!r} is in no layer; add it to LAYERS"
        if here != there and DEPTH[there] <= DEPTH[here] and one.file != MAY_NAME_ANY_PACKAGE:
            problems.append(str(one))
    assert not problems, "\n".join(["imports against the layout:", *problems])


def test_models_and_recipes_do_not_import_torch_distributed() -> None:
    problems = [str(one) for one in imports() if one.units[0] in ("models", "recipes") and "torch.dist" in one.target]
    assert not problems, "\n".join(["torch.distributed belongs in parallel/:", *problems])


def test_no_private_module_or_name_is_imported_from_another_package() -> None:
    problems = []
    for one in ours():
        owner, private, _ = one.target.partition("._")
        if PACKAGE.joinpath(*owner.split(".")[1:]).with_suffix(".py").is_file():
            owner = owner.rpartition(".")[0]
        if private and not one.target.startswith(f"{owner}.__") and not f"{one.package}.".startswith(f"{owner}."):
            problems.append(str(one))
    assert not problems, "\n".join(["an underscore means private to its package:", *problems])


def test_no_plugin_is_imported_from_outside_its_folder() -> None:
    problems = [
        str(one)
        for one in ours()
        for folder, plugins in PLUGINS.items()
        if one.target.startswith(f"{folder}.")
        and one.target.removeprefix(f"{folder}.").split(".")[0] in plugins
        and one.package != folder
    ]
    assert not problems, "\n".join(["core.registry finds plugins; declare what others need to know:", *problems])


def test_no_code_outside_plugin_folders_compares_a_value_with_a_plugin_name() -> None:
    names, problems = set().union(*PLUGINS.values()), []
    for file, tree in trees().items():
        if ".".join(["paceline", *file.split("/")[:-1]]) in PLUGINS:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare):
                parts = [part for side in (node.left, *node.comparators) for part in (side, *getattr(side, "elts", ()))]
                texts = {part.value for part in parts if isinstance(part, ast.Constant)}
            else:
                texts = {node.value.value} if isinstance(node, ast.MatchValue) else set()  # type: ignore[attr-defined]
            problems += [(file, text, node.lineno) for text in texts & names if (file, text) != NOT_A_PLUGIN]
    assert not problems, f"core.registry finds plugins; declare what others need to know: {problems}"


def test_the_command_line_module_does_not_import_torch() -> None:
    code = "import sys, paceline.cli.app; print(*{'torch', 'torchvision', 'lightning'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.split(), (
        f"importing paceline.cli.app also imports {done.stdout.strip()}; import it in a command"
    )


def test_test_files_have_unique_names_and_do_not_import_conftest() -> None:
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


def test_no_file_mentions_a_local_path_or_an_issue_number() -> None:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout, so its own files cannot be distinguished from others")
    problems = []
    for name in filter(None, listed.stdout.split("\0")):
        try:
            lines = (ROOT / name).read_text().splitlines()
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue  # a binary file, or a deleted file that git still lists
        for number, line in enumerate(lines, start=1):
            problems += [f"{name}:{number}: {what}" for what, pattern in PRIVATE.items() if pattern.search(line)]
    assert not problems, "\n".join(problems)
