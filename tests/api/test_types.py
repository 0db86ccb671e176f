"""The package provides type information to editors and type checkers."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import paceline

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
