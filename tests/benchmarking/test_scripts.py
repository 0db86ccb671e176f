"""The benchmark scripts import only what exists; mypy does not report a missing module."""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from paceline.core.registry import KINDS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_benchmarks_import_only_names_that_exist() -> None:
    missing = []
    for script in BENCHMARKS.glob("*.py"):
        for node in ast.walk(ast.parse(script.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("paceline"):
                for alias in node.names:
                    module = import_module(node.module)
                    if not hasattr(module, alias.name) and not find_spec(f"{node.module}.{alias.name}"):
                        missing.append(f"{script.name}: {node.module}.{alias.name}")
    assert not missing


def test_the_weights_of_every_recipe_are_hashed() -> None:
    (commands,) = (
        ast.literal_eval(node.value)
        for node in ast.parse((BENCHMARKS / "weight_hashes.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RUNS"
    )
    assert {command.split()[0] for command in commands.values()} == set(KINDS["recipe"].built_in())
