"""The plugin registry: built-in plugins, and those of installed packages and of the user's own files."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, reduce
from importlib.machinery import ModuleSpec
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType
from typing import Literal, TextIO, TypeVar

from paceline.core.errors import UserError, unknown
from paceline.core.text import print_line

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


ANNOUNCED = "PACELINE_ANNOUNCED"  # environment variable: topics that this process or an ancestor has already announced


def announce(subject: str, line: str, file: TextIO) -> None:
    """Print a line about a topic, unless this process or an ancestor has already printed one."""
    before = os.environ.get(ANNOUNCED, "").split(os.pathsep)
    if subject not in before:
        print_line(line, file)
        os.environ[ANNOUNCED] = os.pathsep.join([*filter(None, before), subject])


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
