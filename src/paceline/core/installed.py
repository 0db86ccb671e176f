"""Plugins that installed packages add through entry points.

The name of an entry point is the plugin's name, its value a module or `module:Class`. Nothing is imported before a
plugin is used, so a broken package harms only those who use it.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, reduce
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, EntryPoint, distributions
from pathlib import Path
from types import ModuleType

from paceline.core.errors import UserError

GROUPS = "paceline."  # what the names of our groups start with


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
        except (Exception, SystemExit):  # finders are other packages' code, too; `load` says what is wrong
            return ""
        classes = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == self.attribute)
        docstring = ast.get_docstring(next(classes, tree)) or ast.get_docstring(tree) or ""
        return docstring.partition("\n")[0]

    def _broken(self, error: BaseException) -> UserError:
        return UserError(f"{self}: cannot be imported: {type(error).__name__}: {error}; uninstall or repair it")


def installed_plugins(group: str) -> dict[str, list[InstalledPlugin]]:
    """Return the plugins of an entry point group by name; several where packages use the same name."""
    return _scan(tuple(sys.path)).get(group, {})


@cache
def _scan(path: tuple[str, ...]) -> dict[str, dict[str, list[InstalledPlugin]]]:
    """Return all our plugins by group and name; the first package of a name on the path counts, as for imports."""
    found: dict[str, dict[str, list[InstalledPlugin]]] = {}
    packages = set()
    for distribution in distributions(path=list(path)):
        package, entries = _entries(distribution)
        key = package.lower().replace("-", "_")
        if not entries or key in packages:
            continue
        packages.add(key)
        for entry in entries:
            plugin = InstalledPlugin(entry.name, f"{package} {distribution.version}", entry.module, entry.attr or "")
            found.setdefault(entry.group, {}).setdefault(entry.name, []).append(plugin)
    return found


def _entries(distribution: Distribution) -> tuple[str, list[EntryPoint]]:
    """Return a package's name and its entry points for us; none where its metadata is damaged."""
    try:
        entries = [entry for entry in distribution.entry_points if entry.group.startswith(GROUPS)]
        return (distribution.metadata["Name"], entries) if entries else ("", [])
    except Exception:  # most packages have nothing to do with us, and pip reports what is wrong with them
        return "", []


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
