"""Plugins that installed packages add through entry points.

The name of an entry point is the plugin's name; its value is a module or `module:Class`. Plugins are imported only when
they are used, so a broken package affects only the commands that use it.
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

GROUPS = "paceline."  # prefix of Paceline's entry point groups


@dataclass(frozen=True)
class InstalledPlugin:
    """A plugin that an installed package registers as an entry point."""

    name: str
    package: str  # name and version of the package
    module: str
    attribute: str  # name of the class; empty if the entry point names only a module

    def __str__(self) -> str:
        return f"plugin {self.name!r} from package {self.package}"

    def load(self) -> ModuleType:
        """Import the module; raise UserError with the name of the package if this fails."""
        try:
            return importlib.import_module(self.module)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise self._broken(error) from error

    def load_object(self) -> object:
        """Import the module and return the attribute that the entry point refers to."""
        module = self.load()
        try:
            return reduce(getattr, self.attribute.split("."), module)
        except AttributeError as error:
            raise self._broken(error) from error

    def about(self) -> str:
        """Return the first line of the plugin's docstring without importing the plugin, or an empty string."""
        try:
            spec = _find_spec(self.module)
            if spec is None or not spec.origin or not spec.origin.endswith(".py"):
                return ""
            tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        except (Exception, SystemExit):  # third-party finders can raise any exception; `load` reports the problem
            return ""
        classes = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == self.attribute)
        docstring = ast.get_docstring(next(classes, tree)) or ast.get_docstring(tree) or ""
        return docstring.partition("\n")[0]

    def _broken(self, error: BaseException) -> UserError:
        return UserError(f"{self}: cannot be imported: {type(error).__name__}: {error}; uninstall or repair it")


def is_installed(module: str) -> bool:
    """Return whether a module can be imported; return True for an empty name, which means that no module is needed."""
    try:
        return not module or importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package of the module is missing
        return False


@dataclass
class _Found:
    plugins: dict[str, dict[str, list[InstalledPlugin]]]  # plugins by entry point group and name
    damaged: list[str]  # one line per package whose entry points cannot be read


def installed_plugins(group: str) -> dict[str, list[InstalledPlugin]]:
    """Return the plugins in an entry point group by name; several packages can use the same name."""
    return _scan(tuple(sys.path)).plugins.get(group, {})


def damaged_packages() -> list[str]:
    """Return one line per package whose entry points for Paceline cannot be read."""
    return _scan(tuple(sys.path)).damaged


@cache
def _scan(path: tuple[str, ...]) -> _Found:
    """Find all plugins; if a package is on the import path twice, use the first copy, as `import` does."""
    found, packages = _Found({}, []), set()
    for distribution in distributions(path=list(path)):
        try:
            if f"[{GROUPS}" not in (distribution.read_text("entry_points.txt") or ""):
                continue  # without parsing its metadata, which would take most of the time
            package, version = distribution.metadata["Name"], distribution.version
        except Exception:  # damaged metadata of unrelated packages is not reported
            continue
        if package in packages:
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
    """Find a module like importlib.util.find_spec, but without importing its parent packages."""
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
