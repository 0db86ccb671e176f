"""The benchmark of weight hashes trains every recipe."""

from __future__ import annotations

import ast
from pathlib import Path

from paceline.core.registry import KINDS

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "weight_hashes.py"


def test_every_recipe_is_trained() -> None:
    (commands,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(SCRIPT.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RUNS"
    )
    assert {command.split()[0] for command in commands.values()} == set(KINDS["recipe"].built_in())
