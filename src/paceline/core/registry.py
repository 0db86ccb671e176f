"""The plugin registry: built-in plugins, and those of installed packages and of the user's own files."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from types import ModuleType
from typing import Literal, TextIO, TypeVar

from paceline.core.errors import UserError, unknown
from paceline.core.text import print_line

GROUPS = "paceline."  # prefix of Paceline's entry point groups


def is_installed(module: str) -> bool:
    """Return whether a module can be imported; return True for an empty name, which means that no module is needed."""
    try:
        return not module or importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package of the module is missing
        return False


@cache
def _scan(path: tuple[str, ...]) -> dict[str, dict[str, list[EntryPoint]]]:
    """Return all plugins of installed packages by entry point group and name; several packages can use the same name.

    If a package is on the import path twice, only the first copy counts, as for `import`. A package whose metadata is
    damaged has no plugins.
    """
    found: dict[str, dict[str, list[EntryPoint]]] = {}
    packages = set()
    for distribution in distributions(path=list(path)):
        with suppress(Exception):
            if f"[{GROUPS}" not in (distribution.read_text("entry_points.txt") or ""):
                continue  # without parsing its metadata, which would take most of the time
            entries, package = list(distribution.entry_points), distribution.metadata["Name"]
            if package in packages:
                continue
            packages.add(package)
            for entry in entries:
                found.setdefault(entry.group, {}).setdefault(entry.name, []).append(entry)
    return found


def _package(plugin: EntryPoint) -> str:
    """Return the name and version of the package that installs a plugin."""
    return f"{plugin.dist.metadata['Name']} {plugin.dist.version}" if plugin.dist else "?"


def _described(plugin: EntryPoint) -> str:
    return f"plugin {plugin.name!r} from package {_package(plugin)}"


def _load_installed(plugin: EntryPoint) -> object:
    """Import an installed plugin's class or module; raise UserError with the name of the package if this fails."""
    try:
        return plugin.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise UserError(
            f"{_described(plugin)}: cannot be imported: {_in_words(error)}; uninstall or repair it"
        ) from error


def _source_of(module: str) -> Path | None:
    """Return the file of a module without importing it or its parent packages; None if there is no such file."""
    top, *parts = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is None:
        return None
    if not parts:
        return Path(spec.origin)
    place = Path(spec.origin).parent.joinpath(*parts)
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


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

    def installed(self) -> dict[str, list[EntryPoint]]:
        """Return the plugins that installed packages add, by name."""
        return _scan(tuple(sys.path)).get(self.group, {})

    def clash(self, name: str) -> str:
        """Return a message if an installed plugin has the name of a built-in plugin, or an empty string."""
        hidden = self.installed().get(name, []) if name in self.built_in() else []
        return (
            f"{_described(hidden[0])}: hidden by the built-in {self.name} {name!r}; rename or uninstall it"
            if hidden
            else ""
        )


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
    if name in KINDS[kind].built_in():
        file: Path | None = KINDS[kind].folder / f"{name}.py"
        attribute = ""
    else:
        plugin = _installed(kind, name)
        file, attribute = _source_of(plugin.module), plugin.attr or ""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8")) if file else ast.Module([], [])
    except SyntaxError as error:
        return f"cannot be imported: {_in_words(error)}"
    except OSError:  # the module does not exist, which `load_class` reports
        return ""
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == attribute)
    docstring = ast.get_docstring(next(classes, tree)) or ast.get_docstring(tree) or ""
    return docstring.partition("\n")[0]


def preset_names(recipe: str) -> list[str]:
    """Return the presets of a built-in recipe from its source code, because importing it would load PyTorch."""
    kind = KINDS["recipe"]
    return sorted(_presets(kind.folder / f"{recipe}.py")) if recipe in kind.built_in() else []


def _presets(file: Path) -> set[str]:
    """Return the keys of `presets` in a module and, if they come from elsewhere, in the recipe code that it imports."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    keys: list[ast.expr | None] = []
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            keys += node.value.keys if isinstance(target, ast.Name) and target.id.lower() == "presets" else []
    found = {str(key.value) for key in keys if isinstance(key, ast.Constant)}
    if keys and None not in keys:  # None stands for another dictionary
        return found
    modules = [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    parts = [module for module in modules if module.startswith(KINDS["recipe"].package)]
    return found.union(
        *(_presets(Path(__file__).parents[2].joinpath(*part.split(".")).with_suffix(".py")) for part in parts)
    )


def check_name(kind: PluginKind, name: str) -> None:
    """Raise UserError if there is no plugin with this name or path, without importing the plugin."""
    if is_path(name):
        if not Path(name).is_file():
            every = ", ".join(names(kind))
            raise UserError(f"{kind} {str(Path(name))!r}: no such file; use the path to a .py file, or one of {every}")
    elif name not in KINDS[kind].built_in():
        _installed(kind, name)


def _load(kind: PluginKind, name: str) -> ModuleType:
    """Import and return the module of a built-in plugin or of a user's own file."""
    if is_path(name):
        return load_user_file(kind, Path(name))
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
    check_name(kind, name)
    shown = f"{kind} {name!r}"
    if is_path(name) or name in KINDS[kind].built_in():
        loaded: object = _load(kind, name)
    else:
        plugin = _installed(kind, name)
        loaded, shown = _load_installed(plugin), _described(plugin)
    module = loaded.__name__ if isinstance(loaded, ModuleType) else ""
    classes = filter(inspect.isclass, vars(loaded).values() if module else [loaded])
    found = [value for value in classes if issubclass(value, base) and module in ("", value.__module__)]
    if not found:
        raise UserError(f"{shown}: defines no subclass of {kind.capitalize()}; add one")
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
    found = []
    for kind in KINDS.values():
        for name in kind.installed():
            if clash := kind.clash(name):
                found.append(clash)
                continue
            try:
                _load_installed(_installed(kind.name, name))
            except UserError as error:
                found.append(str(error))
    return found


def _installed(kind: PluginKind, name: str) -> EntryPoint:
    """Return the installed plugin with this name; raise UserError if there is none, or if several packages have one."""
    found = KINDS[kind].installed().get(name, [])
    if not found:
        raise unknown(kind, name, names(kind))
    if len(found) > 1:
        packages = " and ".join(map(_package, found))
        raise UserError(f"{kind} {name!r}: provided by more than one package: {packages}; uninstall all but one")
    return found[0]
