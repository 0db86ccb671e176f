"""Rules for the package layout. Each rule is a function that returns one line per violation."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from paceline.core.registry import KINDS

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
SINGLE_DEVICE = {"models", "recipes"}  # packages that must not use torch.distributed
PLUGIN_FOLDERS = tuple(kind.package for kind in KINDS.values())
TEMPLATES = "commands/templates"  # recipe templates for users, exempt from the import rules
MAX_SHARE = 0.15  # maximum fraction of all code lines that one package may have
MODULE = re.compile(r"paceline(\.\w+)+")
COMMAND = re.compile(r"-m (paceline(?:\.\w+)+)")


class Import(NamedTuple):
    """An imported module or name, and the location of the import."""

    file: str
    line: int
    unit: str  # the importing unit: a package or module directly under `paceline`
    parents: tuple[str, ...]  # dotted name of the package that contains the file, as parts
    target: str  # dotted name of the imported module or name

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.unit} → {self.target}"

    @property
    def target_unit(self) -> str | None:
        """Return the imported unit, or None for the version and for modules outside Paceline."""
        first, _, rest = self.target.partition(".")
        if first != "paceline" or rest == "__version__":
            return None
        unit = rest.split(".")[0]
        return unit if unit in DEPTH else "paceline"


def modules(package: Path) -> Iterator[tuple[Path, ast.Module]]:
    """Yield every file in a package with its path and syntax tree."""
    for file in sorted(package.rglob("*.py")):
        yield file.relative_to(package), _parse(file.read_text())


@cache
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


@cache  # no test changes a package after its imports were listed
def imports(package: Path) -> list[Import]:
    """Return all imports in a package, including those inside functions and module names in strings."""
    found = []
    for path, tree in modules(package):
        if path.is_relative_to(TEMPLATES):
            continue
        unit = "paceline" if path.parts == ("__init__.py",) else path.with_suffix("").parts[0]
        parents = ("paceline", *path.parts[:-1])  # the package that `from .` refers to
        skipped = _docstrings(tree) | _parts_of_texts(tree)
        for node in ast.walk(tree):
            if node not in skipped:
                name = f"{package.name}/{path.as_posix()}"
                found += [Import(name, node.lineno, unit, parents, target) for target in _targets(node, parents)]
    return found


def _targets(node: ast.AST, parents: tuple[str, ...]) -> list[str]:
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom():
            base = parents[: len(parents) - node.level + 1] if node.level else ()
            origin = ".".join([*base, *([node.module] if node.module else [])])
            return [f"{origin}.{alias.name}" for alias in node.names]
        case ast.JoinedStr(values=[ast.Constant(value=str(start)), *_]) if start.startswith("paceline."):
            return [start.rpartition(".")[0]]
        case ast.Constant(value=str(text)):
            named = [text] if MODULE.fullmatch(text) else COMMAND.findall(text)
            return [name for name in named if name.split(".")[1] in DEPTH]  # skips keys and entry-point groups
    return []


def _docstrings(tree: ast.Module) -> set[ast.AST]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def _parts_of_texts(tree: ast.Module) -> set[ast.AST]:
    return {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}


def upward(package: Path, allowed: Collection[str] = ()) -> list[str]:
    """Return imports from a higher layer or the same one, except in the `allowed` files."""
    problems = []
    for one in imports(package):
        here, there = one.unit, one.target_unit
        if here not in DEPTH:
            problems.append(
                f"{one.file}: {here!r} is in no layer; add it to LAYERS in layout_rules.py and to the layout"
            )
        elif there is None or there == here or one.file in allowed:
            continue
        elif DEPTH[there] < DEPTH[here]:
            problems.append(f"{one} points up")
        elif DEPTH[there] == DEPTH[here]:
            problems.append(f"{one} points sideways: {here} and {there} do not import each other")
    return list(dict.fromkeys(problems))


def distributed(package: Path) -> list[str]:
    """Return the imports of torch.distributed in models and recipes."""
    return [
        str(one)
        for one in imports(package)
        if one.unit in SINGLE_DEVICE and f"{one.target}.".startswith("torch.distributed.")
    ]


def private(package: Path) -> list[str]:
    """Return the imports of private modules and names by files outside their package."""
    problems = []
    for one in imports(package):
        parts = tuple(one.target.split("."))
        hidden = next((i for i, part in enumerate(parts) if re.match("_(?!_)", part)), 0)
        if parts[0] != "paceline" or not hidden:
            continue
        owner = parts[:hidden]
        if (package.joinpath(*owner[1:])).with_suffix(".py").is_file():
            owner = owner[:-1]
        if one.parents[: len(owner)] != owner:
            problems.append(f"{one} is private to {'.'.join(owner)}")
    return problems


def plugin_imports(package: Path) -> list[str]:
    """Return the imports of plugin modules by files outside the plugin's folder."""
    problems = []
    for one in imports(package):
        for folder in PLUGIN_FOLDERS:
            name = one.target.removeprefix(f"{folder}.").split(".")[0]
            is_inside = ".".join(one.parents) == folder
            if one.target.startswith(f"{folder}.") and name in _plugins(package, folder) and not is_inside:
                problems.append(f"{one.file}:{one.line}: imports the plugin {folder}.{name}")
    return list(dict.fromkeys(problems))


def plugin_comparisons(package: Path) -> list[str]:
    """Return the lines outside the plugin folders that compare a value with a plugin's name."""
    names = {name for folder in PLUGIN_FOLDERS for name in _plugins(package, folder)}
    problems = []
    for path, tree in modules(package):
        if ".".join(("paceline", *path.parts[:-1])) in PLUGIN_FOLDERS and path.name != "__init__.py":
            continue
        constants = _constants(tree)
        for line, text in sorted({found for node in ast.walk(tree) for found in _compared(node, constants)}):
            if text in names:
                problems.append(f"{package.name}/{path.as_posix()}:{line}: compares with the plugin {text!r}")
    return problems


def _compared(node: ast.AST, constants: Mapping[str, set[str]]) -> Iterator[tuple[int, str]]:
    """Yield the strings used in a comparison, each with its line number."""
    match node:
        case ast.Compare() if any(isinstance(op, ast.Eq | ast.NotEq | ast.In | ast.NotIn) for op in node.ops):
            for side in (node.left, *node.comparators):
                yield from ((node.lineno, text) for text in _texts(side, constants))
        case ast.MatchValue(value=ast.Constant(value=str(text))):
            yield node.lineno, text


def _texts(node: ast.AST, constants: Mapping[str, set[str]]) -> set[str]:
    """Return the strings in an expression, including those assigned to constants that it uses."""
    match node:
        case ast.Constant(value=str(text)):
            return {text}
        case ast.Tuple() | ast.List() | ast.Set():
            return {text for element in node.elts for text in _texts(element, constants)}
        case ast.Name():
            return constants.get(node.id, set())
    return set()


def _constants(tree: ast.Module) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found[name] = _texts(value, found)
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                pairs = zip(targets, values, strict=False)
                found |= {one.id: _texts(value, found) for one, value in pairs if isinstance(one, ast.Name)}
    return found


def _plugins(package: Path, folder: str) -> set[str]:
    files = package.joinpath(*folder.split(".")[1:]).glob("*.py")
    return {file.stem for file in files if not file.stem.startswith("_")}


def large_packages(package: Path) -> list[str]:
    """Return the packages with more than the fraction MAX_SHARE of all lines."""
    counts = _line_counts(package)
    total, by_unit = sum(counts.values()), dict.fromkeys((path.parts[0] for path in counts), 0)
    for path, count in counts.items():
        by_unit[path.parts[0]] += count
    return [
        f"{unit}: {count / total:.1%} of {total} lines; split it by what it is for"
        for unit, count in by_unit.items()
        if count > MAX_SHARE * total
    ]


def _line_counts(package: Path) -> dict[Path, int]:
    return {file.relative_to(package): len(file.read_text().splitlines()) for file in sorted(package.rglob("*.py"))}
