"""The plugin registry. A built-in plugin is one file in the folder for its kind, and is named after the file.

Installed packages add plugins through entry points, and a user's own file is given by its path. A built-in plugin takes
precedence over an installed plugin with the same name, so installing a package never changes what a command does.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal, TypeVar

from paceline.core.announce import announce
from paceline.core.errors import UserError, unknown
from paceline.core.installed import InstalledPlugin, damaged_packages, installed_plugins
from paceline.core.user_file import PREFIX, is_path, load_user_file

__all__ = [
    "KINDS",
    "Kind",
    "PluginKind",
    "about",
    "check_name",
    "fault_of_plugin",
    "is_path",
    "load",
    "load_class",
    "load_classes",
    "names",
    "plugin_problems",
]

Base = TypeVar("Base")
PluginKind = Literal["recipe", "source", "loader", "strategy", "evaluator", "logger", "importer"]


@dataclass(frozen=True)
class Kind:
    """A kind of plugin, with the package and entry point group that its plugins come from."""

    name: PluginKind
    package: str  # the package whose modules are the built-in plugins
    group: str  # the entry point group of installed plugins

    @property
    def folder(self) -> Path:
        """The folder with the built-in plugins."""
        return Path(__file__).parents[1].joinpath(*self.package.split(".")[1:])

    def built_in(self) -> set[str]:
        """Return the names of the built-in plugins."""
        return {file.stem for file in self.folder.glob("*.py") if not file.stem.startswith("_")}

    def installed(self) -> dict[str, list[InstalledPlugin]]:
        """Return the plugins that installed packages add, by name."""
        return installed_plugins(self.group)

    def clash(self, name: str) -> str:
        """Return a message if an installed plugin has the name of a built-in plugin, or an empty string."""
        hidden = self.installed().get(name, []) if name in self.built_in() else []
        return f"{hidden[0]}: hidden by the built-in {self.name} {name!r}; rename or uninstall it" if hidden else ""


KINDS = {
    kind.name: kind
    for kind in (
        Kind("recipe", "paceline.recipes", "paceline.recipes"),
        Kind("source", "paceline.data.sources", "paceline.sources"),
        Kind("loader", "paceline.data.loaders", "paceline.loaders"),
        Kind("strategy", "paceline.parallel.strategies", "paceline.strategies"),
        Kind("evaluator", "paceline.evaluation.evaluators", "paceline.evaluators"),
        Kind("logger", "paceline.runs.loggers", "paceline.loggers"),
        Kind("importer", "paceline.recipes.importers", "paceline.importers"),
    )
}


def names(kind: PluginKind) -> list[str]:
    """Return the sorted names of a kind's built-in and installed plugins, without importing them."""
    return sorted(KINDS[kind].built_in() | KINDS[kind].installed().keys())


def about(kind: PluginKind, name: str) -> str:
    """Return the first line of a plugin's docstring without importing the plugin."""
    if name not in KINDS[kind].built_in():
        return _installed(kind, name).about()
    try:
        docstring = ast.get_docstring(ast.parse((KINDS[kind].folder / f"{name}.py").read_text(encoding="utf-8")))
    except SyntaxError as error:
        return f"cannot be imported: {_in_words(error)}"
    return (docstring or "").partition("\n")[0]


def check_name(kind: PluginKind, name: str) -> None:
    """Raise UserError if there is no plugin with this name or path, without importing the plugin."""
    if is_path(name):
        if not Path(name).is_file():
            every = ", ".join(names(kind))
            raise UserError(f"{kind} {str(Path(name))!r}: no such file; use the path to a .py file, or one of {every}")
    elif name not in KINDS[kind].built_in():
        _installed(kind, name)


def load(kind: PluginKind, name: str) -> ModuleType:
    """Import and return a plugin's module, given its name or the path to its file."""
    check_name(kind, name)
    if is_path(name):
        return load_user_file(kind, Path(name))
    if name not in KINDS[kind].built_in():
        return _installed(kind, name).load()
    if clash := KINDS[kind].clash(name):
        announce(f"{kind} {name}", clash, sys.stderr)
    try:
        return importlib.import_module(f"{KINDS[kind].package}.{name}")
    except ImportError:  # a package is missing; the caller reports which extra to install
        raise
    except Exception as error:
        place = KINDS[kind].folder / f"{name}.py"
        raise UserError(f"{kind} {name!r}: cannot be imported: {_in_words(error)}; repair or remove {place}") from error


def load_class(kind: PluginKind, name: str, base: type[Base]) -> type[Base]:
    """Return a plugin's class: the last subclass of `base` in its module, or the class in its entry point."""
    module = load(kind, name)
    named = None if is_path(name) or name in KINDS[kind].built_in() else _installed(kind, name)
    if named is not None and named.attribute:
        classes = [value for value in [named.load_object()] if inspect.isclass(value)]
    else:
        defined = filter(inspect.isclass, vars(module).values())
        classes = [value for value in defined if value.__module__ == module.__name__]
    found = [value for value in classes if issubclass(value, base)]
    if not found:
        raise UserError(f"{named or f'{kind} {name!r}'}: defines no subclass of {base.__name__}; add one")
    return found[-1]


def load_classes(kind: PluginKind, base: type[Base]) -> dict[str, type[Base]]:
    """Return all plugin classes of a kind by name; skip broken plugins, which `plugin_problems` reports."""
    found = {}
    for name in names(kind):
        try:
            found[name] = load_class(kind, name, base)
        except UserError:
            continue
    return found


def fault_of_plugin(error: BaseException) -> UserError | None:
    """Return the one-line error for an exception in the code of a user's file or of an installed plugin; else None."""
    if isinstance(error, UserError):
        return error
    installed = [plugin for kind in KINDS.values() for same in kind.installed().values() for plugin in same]
    packages = {plugin.module.partition(".")[0] for plugin in installed}
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        module = str(frame.f_globals.get("__name__"))
        if module.startswith(PREFIX) or module.partition(".")[0] in packages:
            return UserError(f"{frame.f_code.co_filename}:{line}: {' '.join(_in_words(error).split())}; correct it")
        if isinstance(error, RuntimeError) and module.startswith(("torch.distributed.", "paceline.")):
            return None  # another process may have failed
    return None


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def plugin_problems() -> list[str]:
    """Import all installed plugins; return a line for each plugin that is hidden, ambiguous or cannot be imported."""
    found = list(damaged_packages())
    for kind in KINDS.values():
        for name in kind.installed():
            if clash := kind.clash(name):
                found.append(clash)
                continue
            try:
                plugin = _installed(kind.name, name)
                plugin.load_object() if plugin.attribute else plugin.load()
            except UserError as error:
                found.append(str(error))
    return found


def _installed(kind: PluginKind, name: str) -> InstalledPlugin:
    """Return the installed plugin with this name; raise UserError if there is none, or if several packages have one."""
    found = KINDS[kind].installed().get(name, [])
    if not found:
        raise unknown(kind, name, names(kind))
    if len(found) > 1:
        packages = " and ".join(plugin.package for plugin in found)
        raise UserError(f"{kind} {name!r}: provided by more than one package: {packages}; uninstall all but one")
    return found[0]
