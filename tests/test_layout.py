"""Rules for the source tree: the direction of imports, access to plugins, package sizes and forbidden text."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from layout_rules import (
    distributed,
    large_packages,
    plugin_comparisons,
    plugin_imports,
    private,
    upward,
)

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "paceline"

MAY_NAME_ANY_PACKAGE = {"paceline/core/registry.py"}  # this file lists the plugin folders
TOLERATED_IMPORTS: dict[str, str] = {}  # the reason for each tolerated violation
TOLERATED_COMPARISONS = {
    "paceline/models/gan_augmentation.py: compares with the plugin 'translation'": "the paper's name for a shift",
}


def _package(folder: Path, files: dict[str, str]) -> Path:
    package = folder / "paceline"
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text + "\n")
    return package


# Packages import only from lower layers


def test_no_package_imports_from_a_higher_layer() -> None:
    problems = upward(PACKAGE, MAY_NAME_ANY_PACKAGE)
    assert not problems, "\n".join(["imports against the layout:", *problems])


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        ("models/net.py", "import paceline.training.loop", "1: models → paceline.training.loop points up"),
        ("data/a.py", "def f():\n    from paceline import commands", "2: data → paceline.commands points up"),
        ("config.py", "from .data.tickets import part", "1: config → paceline.data.tickets.part points up"),
        ("data/a/b.py", "from ...cli import main", "1: data → paceline.cli.main points up"),
        ("data/__init__.py", "from ..training import loop", "1: data → paceline.training.loop points up"),
        ("training/a.py", "from paceline import train", "1: training → paceline.train points up"),
        ("recipes/a.py", "import paceline.parallel", "recipes and parallel do not import each other"),
        ("parallel/a.py", "from paceline.recipes import x", "parallel and recipes do not import each other"),
        ("training/a.py", "import_module('paceline.launch.x')", "1: training → paceline.launch.x points up"),
        ("training/a.py", "__import__('paceline.launch.x')", "1: training → paceline.launch.x points up"),
        ("data/a.py", "load(f'paceline.recipes.{name}')", "1: data → paceline.recipes points sideways"),
        ("data/a.py", "load(f'paceline.runs.folder.{name}')", "1: data → paceline.runs.folder points up"),
        ("runs/a.py", "WORKER = 'paceline.launch.worker'", "1: runs → paceline.launch.worker points up"),
        ("runs/a.py", "start('python -m paceline.launch.worker x')", "1: runs → paceline.launch.worker points up"),
        ("runs/a.py", "run([python, '-m', 'paceline.commands.train'])", "1: runs → paceline.commands.train points up"),
        ("helpers.py", "import os", " 'helpers' is in no layer"),
    ],
)
def test_an_import_from_a_higher_layer_is_reported_with_file_and_line(
    tmp_path: Path, file: str, text: str, fault: str
) -> None:
    (found,) = upward(_package(tmp_path, {file: text}))
    assert found.startswith(f"paceline/{file}:") and fault in found


def test_imports_from_lower_layers_and_within_a_package_are_allowed(tmp_path: Path) -> None:
    package = _package(
        tmp_path,
        {
            "cli/app.py": "from paceline.commands import train\nfrom paceline import __version__",
            "commands/train.py": "from paceline.training.loop import run\nfrom paceline.models import resnet",
            "training/loop.py": "from .step import step\nfrom paceline.config import resolve",
            "data/loader.py": "from paceline.data.source import Source\nimport torch.distributed",
            "evaluation/accuracy.py": "from paceline.data import source\nKEY = 'paceline.protocol'",
            "launch/worker.py": "'''python -m paceline.commands.x'''\nWORKER = 'paceline.launch.worker'",
            "contracts/recipe.py": "from paceline.core.errors import UserError",
        },
    )
    assert upward(package) == []


# Models and recipes do not use torch.distributed


def test_models_and_recipes_do_not_import_torch_distributed() -> None:
    problems = distributed(PACKAGE)
    assert not problems, "\n".join(["torch.distributed belongs in parallel/:", *problems])


@pytest.mark.parametrize("text", ["import torch.distributed as dist", "from torch import distributed"])
def test_a_model_that_imports_torch_distributed_is_reported(tmp_path: Path, text: str) -> None:
    (fault,) = distributed(_package(tmp_path, {"models/net.py": text}))
    assert fault == "paceline/models/net.py:1: models → torch.distributed"


# Names with an underscore are private to their package


def test_no_private_module_is_imported_from_another_package() -> None:
    problems = private(PACKAGE)
    assert not problems, "\n".join(["an underscore means private to its package:", *problems])


@pytest.mark.parametrize(
    ("file", "text", "owner"),
    [
        ("runs/a.py", "from paceline.data._pixels import Pixels", "paceline.data"),
        ("runs/a.py", "from paceline.data import _pixels", "paceline.data"),
        ("runs/a.py", "import_module('paceline.data._pixels')", "paceline.data"),
        ("data/a.py", "from paceline.data.sources._tissue import x", "paceline.data.sources"),
        ("runs/a.py", "from paceline.data.source import _underlying", "paceline.data"),
    ],
)
def test_a_private_module_or_name_of_another_package_is_reported(
    tmp_path: Path, file: str, text: str, owner: str
) -> None:
    (fault,) = private(_package(tmp_path, {file: text, "data/source.py": ""}))
    assert fault.startswith(f"paceline/{file}:1: ") and fault.endswith(f"is private to {owner}")


def test_a_package_may_import_its_own_private_modules(tmp_path: Path) -> None:
    files = {
        "data/a.py": "from paceline.data import _pixels\nfrom ._pixels import Pixels\nfrom paceline.data.b import _f",
        "data/sources/c.py": "from paceline.data._pixels import Pixels",
        "data/b.py": "from paceline import __version__\nimport torch._inductor",
    }
    assert private(_package(tmp_path, files)) == []


# Plugins are loaded only through the registry


def test_no_plugin_is_imported_from_outside_its_folder() -> None:
    problems, unused = _less(plugin_imports(PACKAGE), TOLERATED_IMPORTS)
    assert not problems, "\n".join(
        ["plugins declare what others need to know, and core.registry finds them:", *problems]
    )
    assert not unused, f"no longer needed: {unused}"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("commands/a.py", "from paceline.recipes.dcgan import DCGAN"),
        ("commands/a.py", "from paceline.recipes import dcgan"),
        ("commands/a.py", "import_module('paceline.recipes.dcgan')"),
        ("data/a.py", "from paceline.data.sources.photos import Photos"),
        ("data/a.py", "from .sources.photos import Photos"),
        ("data/loaders/b.py", "from paceline.data.sources.photos import Photos"),
        ("recipes/parts/a.py", "from paceline.recipes.dcgan import DCGAN"),
    ],
)
def test_an_import_of_a_plugin_from_outside_its_folder_is_reported(tmp_path: Path, file: str, text: str) -> None:
    plugins = {"recipes/dcgan.py": "", "data/sources/photos.py": ""}
    (fault,) = plugin_imports(_package(tmp_path, {file: text, **plugins}))
    assert fault.startswith(f"paceline/{file}:1: imports the plugin paceline.")


def test_plugins_may_import_each_other_and_shared_modules(tmp_path: Path) -> None:
    files = {
        "data/sources/degraded.py": "from paceline.data.sources.photos import Photos",
        "data/sources/photos.py": "from paceline.data.source import Source",
        "recipes/dcgan.py": "from paceline.recipes.parts.adversarial import Adversarial",
        "commands/a.py": "import paceline.data.sources\nfrom paceline.recipes.parts.adversarial import Adversarial",
    }
    assert plugin_imports(_package(tmp_path, files)) == []


def test_no_code_outside_plugin_folders_compares_a_value_with_a_plugin_name() -> None:
    problems, unused = _less(plugin_comparisons(PACKAGE), TOLERATED_COMPARISONS)
    assert not problems, "\n".join(
        ["plugins declare what others need to know, and core.registry finds them:", *problems]
    )
    assert not unused, f"no longer needed: {unused}"


@pytest.mark.parametrize(
    "text",
    [
        "if name == 'dp': pass",
        "if 'dp' != name: pass",
        "if name in ('dp', 'ring'): pass",
        "if name not in {'dp'}: pass",
        "if 'dp' in names: pass",
        "DP = 'dp'\nname == DP",
        "NEEDY = ('ring', 'dp')\nname in NEEDY",
        "match name:\n    case 'dp' | 'ring': pass",
    ],
)
def test_a_comparison_with_a_plugin_name_is_reported(tmp_path: Path, text: str) -> None:
    package = _package(tmp_path, {"runs/a.py": text, "parallel/strategies/dp.py": ""})
    (fault,) = plugin_comparisons(package)
    assert fault.startswith("paceline/runs/a.py:") and fault.endswith(": compares with the plugin 'dp'")


def test_comparisons_with_plugin_names_are_allowed_inside_plugins(tmp_path: Path) -> None:
    files = {
        "parallel/strategies/dp.py": "if name == 'dp': pass",
        "runs/a.py": "DEFAULT = 'dp'\nif name == 'auto' or count > 1: name = 'dp'\nshow('dp is', NAMES['dp'])",
    }
    assert plugin_comparisons(_package(tmp_path, files)) == []


def _less(problems: list[str], tolerated: dict[str, str]) -> tuple[list[str], set[str]]:
    """Return violations that are not tolerated, and tolerated entries that no longer occur."""
    kept = {re.sub(r"(\.py):\d+", r"\1", fault): fault for fault in problems}
    return [fault for key, fault in kept.items() if key not in tolerated], tolerated.keys() - kept.keys()


# Package sizes


def test_no_package_exceeds_the_maximum_fraction_of_the_code() -> None:
    large = large_packages(PACKAGE)
    assert not large, "\n".join(large)


def test_a_package_that_is_too_large_is_reported(tmp_path: Path) -> None:
    files = {f"{unit}/a.py": "#\n" * 12 for unit in ("cli", "runs", "data", "core", "images", "models", "launch")}
    assert large_packages(_package(tmp_path, files)) == []
    (fault,) = large_packages(_package(tmp_path, {"runs/b.py": "#\n" * 8}))
    assert fault.startswith("runs: 22.0% of 100 lines")


# Imports at startup, test modules and forbidden text


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
