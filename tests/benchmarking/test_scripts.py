"""The benchmark scripts import only what exists."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_benchmark_imports_only_names_that_exist(script: Path) -> None:
    missing = []
    for node in ast.walk(ast.parse(script.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        names = {alias.name for alias in node.names}
        if node.module.startswith("paceline"):
            module = import_module(node.module)
            missing += [f"{node.module}.{name}" for name in names if not _has(module, name)]
        elif (other := script.with_name(f"{node.module}.py")).is_file():
            missing += [f"{node.module}.{name}" for name in names - _defined(other)]
    assert not missing


def _has(module: object, name: str) -> bool:
    if hasattr(module, name):
        return True
    try:
        import_module(f"{getattr(module, '__name__', '')}.{name}")
    except ModuleNotFoundError:
        return False
    return True


def _defined(script: Path) -> set[str]:
    """Return the names that a script defines or imports at its top level."""
    found: set[str] = set()
    for node in ast.parse(script.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        else:
            found |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    return found
