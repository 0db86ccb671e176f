"""Reads the presets of a built-in recipe from its source code. Importing the recipe would load PyTorch."""

from __future__ import annotations

import ast
from pathlib import Path

from paceline.core.registry import KINDS

ROOT = Path(__file__).parents[2]  # the folder that contains the package


def preset_names(recipe: str) -> list[str]:
    """Return the names of a built-in recipe's presets; empty for recipes from other packages."""
    file = KINDS["recipe"].folder / f"{recipe}.py"
    if not file.is_file():
        return []
    classes = _classes(file)
    return sorted(_presets(file, list(classes)[-1])) if classes else []


def _presets(file: Path, class_name: str) -> set[str]:
    """Return the keys of a class attribute `presets`, including those from base classes and other dictionaries."""
    found = _classes(file).get(class_name)
    if found is None:
        imported = _imported_from(file, class_name)
        return _presets(imported, class_name) if imported else set()
    for statement in found.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        value = getattr(statement, "value", None)
        if not any(isinstance(one, ast.Name) and one.id == "presets" for one in targets):
            continue
        if isinstance(value, ast.Name):
            return _keys(_imported_from(file, value.id) or file, value.id)
        if isinstance(value, ast.Dict):
            names = {key.value for key in value.keys if isinstance(key, ast.Constant)}
            others = [one for key, one in zip(value.keys, value.values, strict=True) if key is None]
            bases = [
                one.value.id for one in others if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name)
            ]
            return {str(name) for name in names}.union(*(_presets(file, base) for base in bases))
    bases = [base.id for base in found.bases if isinstance(base, ast.Name)]
    return set[str]().union(*(_presets(file, base) for base in bases))


def _keys(file: Path, name: str) -> set[str]:
    """Return the keys of a dictionary that a module defines."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(value, ast.Dict) and any(isinstance(one, ast.Name) and one.id == name for one in targets):
            return {str(key.value) for key in value.keys if isinstance(key, ast.Constant)}
    return set()


def _classes(file: Path) -> dict[str, ast.ClassDef]:
    body = ast.parse(file.read_text(encoding="utf-8")).body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}


def _imported_from(file: Path, name: str) -> Path | None:
    """Return the file that a module imports a name from; None if the file is not part of this package."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module and any(alias.name == name for alias in node.names):
            found = ROOT.joinpath(*node.module.split(".")).with_suffix(".py")
            return found if found.is_file() else None
    return None
