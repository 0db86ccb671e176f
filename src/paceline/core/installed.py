"""Plugins that installed packages add through entry points.

The name of an entry point is the plugin's name, its value a module or `module:Class`. Nothing is imported before a
plugin is used, so a broken package harms only those who use it.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, reduce
from importlib.machinery import ModuleSpec
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType

from paceline.core.errors import UserError

GROUPS = "paceline."  # the names of our groups start with it


@dataclass(frozen=True)
class InstalledPlugin:
    """One entry point of one package."""

    name: str
    package: str  # with its version
    module: str
    attribute: str  # the class; empty where the module has one only

    def __str__(self) -> str:
        return f"plugin {self.name!r} of package {self.package}"

    def load(self) -> ModuleType:
        """Import the module; raise UserError that names the package where that fails."""
        try:
            return importlib.import_module(self.module)
        except (Exception, SystemExit) as error:
            raise self._broken(error) from error

    def load_object(self) -> object:
        """Import the module and return the attribute that the entry point names."""
        module = self.load()
        try:
            return reduce(getattr, self.attribute.split("."), module)
        except AttributeError as error:
            raise self._broken(error) from error

    def about(self) -> str:
        """Return the first line of the plugin's docstring without importing it; empty where none is found."""
        try:
            spec = _find_spec(self.module)
            if spec is None or not spec.origin or not spec.origin.endswith(".py"):
                return ""
            tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        except (Exception, SystemExit):  # finders are other packages' code, too; `load` reports what is wrong
            return ""
        classes = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == self.attribute)
        docstring = ast.get_docstring(next(classes, tree)) or ast.get_docstring(tree) or ""
        return docstring.partition("\n")[0]

    def _broken(self, error: BaseException) -> UserError:
        return UserError(f"{self}: cannot be imported: {type(error).__name__}: {error}; uninstall or repair it")


def is_installed(module: str) -> bool:
    """Return whether a module can be imported; an empty name means none is needed."""
    try:
        return not module or importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is inside of
        return False


@dataclass
class _Found:
    plugins: dict[str, dict[str, list[InstalledPlugin]]]  # by group and name
    damaged: list[str]  # a line on each package whose entry points cannot be read


def installed_plugins(group: str) -> dict[str, list[InstalledPlugin]]:
    """Return the plugins of an entry point group by name; several where packages use the same name."""
    return _scan(tuple(sys.path)).plugins.get(group, {})


def damaged_packages() -> list[str]:
    """Return a line on each package that has entry points for us which cannot be read."""
    return _scan(tuple(sys.path)).damaged


@cache
def _scan(path: tuple[str, ...]) -> _Found:
    """Find all our plugins; of a package that is on the path twice the first counts, as for imports."""
    found, packages = _Found({}, []), set()
    for distribution in distributions(path=list(path)):
        try:
            text = distribution.read_text("entry_points.txt") or ""
            package, version = distribution.metadata["Name"], distribution.version
        except Exception:  # an unrelated package with damaged metadata is not ours to report
            continue
        if f"[{GROUPS}" not in text or package in packages:
            continue
        packages.add(package)
        labelled = f"{package} {version}"
        try:
            plugins = [
                (entry.group, InstalledPlugin(entry.name, labelled, entry.module, entry.attr or ""))
                for entry in distribution.entry_points
            ]
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            found.damaged.append(
                f"package {labelled}: its entry points cannot be read: {reason}; uninstall or repair it"
            )
            continue
        for group, plugin in plugins:
            found.plugins.setdefault(group, {}).setdefault(plugin.name, []).append(plugin)
    return found


def _find_spec(module: str) -> ModuleSpec | None:
    """Find a module like importlib.util.find_spec, but without importing the packages that it is in."""
    spec, path = None, None
    for name in _prefixes(module):
        spec = next(filter(None, (finder.find_spec(name, path) for finder in sys.meta_path)), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return spec


def _prefixes(module: str) -> Iterator[str]:
    parts = module.split(".")
    return (".".join(parts[: number + 1]) for number in range(len(parts)))
