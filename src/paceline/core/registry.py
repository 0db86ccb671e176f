"""The module name is the registry: a recipe, strategy, source, loader or judge is one file in its folder.

A person's own file is named by its path and loaded the same way.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from paceline.core.errors import UserError, unknown

Base = TypeVar("Base")

FOLDERS = {
    "recipe": "paceline.recipes",
    "strategy": "paceline.parallel.strategies",
    "source": "paceline.data.sources",
    "loader": "paceline.data.loaders",
    "evaluator": "paceline.evaluation.evaluators",
    "logger": "paceline.runs.loggers",
}
ANNOUNCED = "PACELINE_RUNS_CODE_IN"  # the files that a person was told of, by this process or by one that started it


def names(kind: str) -> list[str]:
    """The names that a command accepts for this kind; imports none of them."""
    return sorted(file.stem for file in _folder(kind).glob("*.py") if not file.stem.startswith("_"))


def about(kind: str, name: str) -> str:
    """The first line of what a registered file says of itself; it is not imported."""
    docstring = ast.get_docstring(ast.parse((_folder(kind) / f"{name}.py").read_text(encoding="utf-8")))
    return (docstring or "").partition("\n")[0]


def _folder(kind: str) -> Path:
    return Path(__file__).parents[1].joinpath(*FOLDERS[kind].split(".")[1:])


def is_path(name: str) -> bool:
    """Whether a name means a person's own file."""
    return name.endswith(".py") or "/" in name


def load(kind: str, name: str) -> ModuleType:
    """The module behind a name or a path."""
    if is_path(name):
        return _load_file(kind, Path(name))
    if name not in names(kind):
        raise unknown(kind, name, names(kind))
    return importlib.import_module(f"{FOLDERS[kind]}.{name}")


def load_class(kind: str, name: str, base: type[Base]) -> type[Base]:
    """The one class in the module behind a name that derives from `base`."""
    module = load(kind, name)
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, base) and value.__module__ == module.__name__
    ]
    if not found:
        raise UserError(f"{kind} {name!r} defines no subclass of {kind.capitalize()}")
    return found[-1]


def _load_file(kind: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"{kind} {str(path)!r}: no such file; a path to a .py file or one of {', '.join(names(kind))}")
    module_name = f"paceline_user_{kind}_{path.stem}"
    loaded = sys.modules.get(module_name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path.resolve()):
        return loaded
    _announce(path)
    spec = importlib.util.spec_from_file_location(module_name, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise UserError(f"{kind} {str(path)!r} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _announce(path: Path) -> None:
    """Says, once for each file, that a person's code is about to run."""
    told = os.environ.get(ANNOUNCED, "").split(os.pathsep)
    if str(path.resolve()) not in told:
        print(f"runs the code in {path}", flush=True)
        os.environ[ANNOUNCED] = os.pathsep.join([*filter(None, told), str(path.resolve())])
