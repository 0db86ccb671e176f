"""Plugins in the user's own files, given by their paths."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from paceline.core.announce import announce
from paceline.core.errors import UserError

PREFIX = "paceline_user_"  # prefix of the module names given to imported user files


def is_path(name: str) -> bool:
    """Return whether a plugin's name is the path to a user's own file."""
    return name.endswith(".py") or "/" in name


def is_loaded(name: str) -> bool:
    """Return whether this process has already imported this .py file."""
    place = str(Path(name).resolve())
    modules = [module for key, module in sys.modules.items() if key.startswith(PREFIX)]
    return any(module.__file__ == place for module in modules)


def load_user_file(kind: str, path: Path) -> ModuleType:
    """Import a .py file once, and print a line before its code runs."""
    module_name = f"{PREFIX}{kind}_{path.stem}"
    loaded = sys.modules.get(module_name)
    if loaded is not None and loaded.__file__ == str(path.resolve()):
        return loaded
    announce(str(path.resolve()), f"running the code in {path}", sys.stdout)
    spec = importlib.util.spec_from_file_location(module_name, path.resolve())
    if spec is None or spec.loader is None:
        raise UserError(f"{kind} {str(path)!r}: not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        del sys.modules[module_name]
        raise UserError(f"{kind} {str(path)!r}: cannot be imported: {type(error).__name__}: {error}") from error
    return module
