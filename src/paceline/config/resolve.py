"""Resolve layers of settings, including tables of named values, into one checked config."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from paceline.config.flags import COMMON, COMMON_ALIASES, FLAGS
from paceline.config.settings import BOUNDS, RETIRED, SHARED_SETTINGS, LearnerSettings, RunSettings
from paceline.config.spans import INTERVALS, Span, parse_interval
from paceline.core.errors import UnknownSetting, UserError, unknown
from paceline.core.registry import is_path
from paceline.core.types import Scalar, SettingValue, SettingValues

if TYPE_CHECKING:
    from paceline.contracts.recipe import Recipe

_CONSTANTS: dict[str, Scalar] = {"true": True, "false": False}


class Text(str):
    """Text from the command line or an INI file. In a table setting, it is converted to the type it looks like."""


class Arguments(dict[str, SettingValue]):
    """The value of a table setting: names with numbers, booleans, strings and lists. It must not be changed.

    `--set TABLE.NAME=VALUE` and the TOML table `[TABLE]` set single entries.
    """

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True))


def argument_value(value: object, where: str) -> SettingValue:
    """Return an entry of a table setting; raise UserError for a value of an unsupported type."""
    if isinstance(value, Text):
        return _parse(str(value), where)
    if isinstance(value, tuple):
        value = list(value)
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, get_args(Scalar)) for item in items):
        raise UserError(f"{where}: {value!r} is not supported; use a number, true, false, text or a list of these")
    if any(isinstance(item, float) and not math.isfinite(item) for item in items):
        raise UserError(f"{where}: {value!r} is not finite; use a finite number")
    return value  # type: ignore[return-value]  # the checks above narrow it


def _parse(text: str, where: str) -> SettingValue:
    """Return a number, a boolean, a list such as [3,3,9,3], or else the text. Text in double quotes stays text."""
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    try:
        parsed = json.loads(text)
    except ValueError:
        if text.startswith("["):
            raise UserError(f"{where}: {text!r} is not a list; write a list like [2,2,6,2]") from None
        return text
    return text if parsed is None else argument_value(parsed, where)


Layer: TypeAlias = dict[str, SettingValue | Mapping[str, SettingValue]]
Group = TypeVar("Group")
TOO_LARGE = {int: 2**63, float: 1e38}  # for torch
TOO_LARGE_FOR_RUN = TOO_LARGE | {float: 1e9}  # epochs, gigabytes, and seconds, which the system could not wait
SPANS_OF_RUN = ("burn_in",)
SPANS_OF_LEARNER = ("warmup", "hold", "ema_half_life")


@dataclass(frozen=True)
class Config:
    """All resolved settings of one run."""

    recipe_name: str
    recipe_class: type[Recipe]
    run: RunSettings
    learner: LearnerSettings
    networks: dict[str, dict[str, SettingValue]]  # learner settings that apply to a single network, by network
    recipe: Any  # an instance of the recipe's `Settings`

    def learner_of(self, network: str) -> LearnerSettings:
        """Return the learner settings for one network."""
        own: Mapping[str, Any] = self.networks.get(network, {})
        return dataclasses.replace(self.learner, **own)

    def values(self) -> dict[str, SettingValue]:
        """Return every setting by its full name, in declaration order."""
        flat: dict[str, SettingValue] = {"recipe": self.recipe_name}
        for group in (self.run, self.learner, self.recipe):
            flat |= _by_full_name(dataclasses.asdict(group))
        for network, chosen in self.networks.items():
            flat |= {f"{network}.{name}": value for name, value in chosen.items()}
        return flat

    def with_run(self, **changes: Any) -> Config:
        """Return a copy of the config with some run settings replaced."""
        return dataclasses.replace(self, run=dataclasses.replace(self.run, **changes))


class Inherited(Layer):
    """A layer that the user did not write for this run: the recipe's defaults or another run's settings.

    Settings in this layer for a source that the run does not use are ignored.
    """


class SourceSettings(Protocol):
    """Looks up the settings that each source adds to those of every run."""

    def of(self, source: str) -> type[RunSettings]:
        """Return a source's settings class."""

    def owners(self) -> dict[str, list[str]]:
        """Return the settings that only some sources have, each with the quoted names of those sources."""


def resolve(
    recipe_name: str,
    recipe_class: type[Recipe],
    layers: Iterable[tuple[str, SettingValues]],
    sources: SourceSettings,
    *,
    load_source: bool = True,
) -> Config:
    """Merge layers of (origin, {name: value}) into one config; later layers override earlier ones.

    If `load_source` is false, a source in the user's own .py file is not imported, and its settings are left out.
    """
    layers = list(layers)
    named = [RunSettings.data, *(str(layer["data"]) for _, layer in layers if "data" in layer)]
    source, is_left_out = named[-1], is_path(named[-1]) and not load_source
    namespace = _Namespace(
        recipe_name,
        source,
        RunSettings if is_left_out else sources.of(source),
        recipe_class.Settings,
        sources,
        {**COMMON, **{name: advice for name, advice in recipe_class.other_names.items() if " " in advice}},
        # The settings that a .py file declares are unknown until the file is imported.
        has_unknown_source=any(is_path(one) and (one != source or is_left_out) for one in named),
    )
    chosen: dict[str, SettingValue] = {}
    tables: dict[str, dict[str, SettingValue]] = {}
    networks: dict[str, dict[str, SettingValue]] = {}
    for origin, layer in layers:
        for full_name, value in flatten(layer).items():
            network, _, name = full_name.rpartition(".")
            name = plain_name(name)
            shown = namespace.shown(full_name) if origin == "flag" else f"{origin} {full_name}"
            if namespace.is_table(network):
                tables.setdefault(plain_name(network), {})[name] = argument_value(value, shown)
                continue
            if not namespace.has(name, origin, shown, inherited=isinstance(layer, Inherited)):
                continue
            converted = convert(value, namespace.hints[name], shown)
            if not network:
                chosen[name] = converted
                for single in networks.values():  # which the value for all networks overrides
                    single.pop(name, None)
            elif namespace.owner[name] is not LearnerSettings:
                raise UserError(
                    f"{origin}: {name!r} applies to the whole run and cannot be set for network {network!r} alone"
                )
            else:
                networks.setdefault(network, {})[name] = converted
    every = {**chosen, **{name: Arguments(entries) for name, entries in tables.items()}}
    config = Config(
        recipe_name,
        recipe_class,
        namespace.make(namespace.run, every),
        namespace.make(LearnerSettings, every),
        {network: values for network, values in networks.items() if values},
        namespace.make(namespace.recipe, every),
    )
    _check(config)
    return config


class _Namespace:
    """All settings of one run by name: those of the run, its source, its learners and its recipe."""

    def __init__(
        self,
        recipe_name: str,
        source: str,
        run: type[RunSettings],
        recipe: type[Any],
        sources: SourceSettings,
        other_names: Mapping[str, str],
        *,
        has_unknown_source: bool,
    ) -> None:
        self.run, self.recipe = run, recipe
        self._recipe_name, self._source, self._sources = recipe_name, source, sources
        self._has_unknown_source, self._other_names = has_unknown_source, other_names
        groups: tuple[type[Any], ...] = (run, LearnerSettings, recipe)
        self.owner: dict[str, type[Any]] = {f.name: group for group in groups for f in fields(group)}
        hints = {group: get_type_hints(group) for group in groups}
        self.hints = {name: hints[group][name] for name, group in self.owner.items()}
        hidden = next((f.name for f in own_fields(run) if self.owner[f.name] is not run), "")
        if hidden:
            raise UserError(
                f"source {source!r}: setting {hidden!r} clashes with a setting in the recipe or its networks; rename it"
            )
        clash = next((f.name for f in fields(recipe) if f.name in SHARED_SETTINGS), "")
        if clash:
            raise UserError(
                f"recipe {recipe_name!r}: setting {clash!r} clashes with a setting that every run has; rename it"
            )

    def has(self, name: str, origin: str, shown: str, *, inherited: bool) -> bool:
        """Return whether this run has a setting; raise UserError if it does not, unless the setting can be ignored."""
        if name in self.owner:
            return True
        if name in RETIRED and origin != "flag" and not origin.startswith("--"):  # in the folder of an older run
            return False
        others = self._sources.owners()
        if inherited and (self._has_unknown_source or name in others):
            return False
        if name in others:
            raise UserError(
                f"{shown} belongs to source {' or '.join(others[name])}, but --data is {self._source!r}; leave it out"
            )
        where = "" if origin == "flag" else f"{origin}: "
        if name in self._other_names:
            raise UnknownSetting(f"{where}unknown setting {name!r}: {self._other_names[name]}", origin)
        listed_by = f"`paceline settings {self._recipe_name}`"
        every = {*self.owner, *others}
        error = unknown("setting", name, every, meant=COMMON_ALIASES.get(name), listed_by=listed_by)
        raise UnknownSetting(f"{where}{error}", origin)

    def shown(self, full_name: str) -> str:
        """Return a setting as messages show it: as a flag, unless only `--set` and Python can set it."""
        is_flag = plain_name(full_name) in FLAGS or full_name not in self.owner
        return f"--{full_name.replace('_', '-')}" if is_flag else full_name

    def is_table(self, name: str) -> bool:
        """Return whether a setting is a table, whose entries are set as `name.entry`."""
        return self.hints.get(plain_name(name)) is Arguments

    def make(self, group: Callable[..., Group], chosen: Mapping[str, object]) -> Group:
        """Construct a group of settings from the chosen values that belong to it."""
        return group(**{name: value for name, value in chosen.items() if self.owner[name] is group})


def own_fields(run_settings: type[RunSettings]) -> list[dataclasses.Field[Any]]:
    """Return the settings that a source adds."""
    return [f for f in fields(run_settings) if f.name not in RunSettings.__dataclass_fields__]


def plain_name(name: str) -> str:
    """Return the canonical name of a setting that may be spelled with hyphens."""
    return name.replace("-", "_")


def flatten(layer: SettingValues) -> dict[str, SettingValue]:
    """Return the settings in a layer by full name; a setting in a network's table becomes `network.name`."""
    flat = _by_full_name({name: value for name, value in layer.items() if name != "recipe"})
    # Settings for a single network come last, because they override settings for all networks.
    return dict(sorted(flat.items(), key=lambda item: "." in item[0]))


def _by_full_name(values: SettingValues) -> dict[str, SettingValue]:
    """Return values by name; the entries of a nested mapping are named `outer.inner`."""
    flat: dict[str, SettingValue] = {}
    for name, value in values.items():
        flat |= {f"{name}.{inner}": v for inner, v in value.items()} if isinstance(value, Mapping) else {name: value}
    return flat


def convert(value: Any, hint: Any, where: str) -> SettingValue:
    """Convert a value or text to the type of its setting; raise UserError if this is not possible."""
    if hint is Arguments:
        raise UserError(f"{where}: is a table; set its entries one by one: NAME.ENTRY=VALUE")
    if get_origin(hint) is Literal:
        text = ("on" if value else "off") if isinstance(value, bool) else str(value)
        if text not in get_args(hint):
            raise UserError(f"{where}: {unknown('value', text, get_args(hint))}")
        return text
    try:
        if hint is bool:
            return {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}[str(value).lower()]
        if isinstance(value, bool):  # which Python converts to 1.0 or "True"
            raise ValueError
        if hint is int:
            return _whole(value)
        if hint is float and not math.isfinite(float(value)):
            raise ValueError
        converted: SettingValue = hint(value)
    except (ValueError, OverflowError, KeyError, TypeError):
        raise UserError(f"{where}: {value!r} is not {_kind(hint)}") from None
    return converted


def _whole(value: Any) -> int:
    """Parse a whole number exactly; scientific notation such as 5e4 is allowed."""
    try:
        return int(str(value))
    except ValueError:
        number = float(value)
        if number != int(number):
            raise
        return int(number)


def _kind(hint: Any) -> str:
    return {bool: "true or false", int: "a whole number", float: "a number"}.get(hint, "text")


def _check(config: Config) -> None:
    """Raise UserError if a value is out of bounds or a span such as `5 epochs` cannot be parsed."""
    spans = [(name, str(getattr(config.run, name))) for name in SPANS_OF_RUN]
    for name, value in config.values().items():
        if str(value).encode(errors="replace").decode() != str(value):
            raise UserError(f"{name}={value!r}: is not valid UTF-8, so it cannot be saved; rename the file or folder")
    _check_bounds(config.run)
    _check_bounds(config.recipe)
    for network in ("", *config.networks):
        learner, prefix = config.learner_of(network), f"{network}." if network else ""
        _check_bounds(learner, network)
        spans += [(prefix + name, str(getattr(learner, name))) for name in SPANS_OF_LEARNER]
        spans += [(f"{prefix}milestones", one) for one in learner.milestones.split(",")]
    for name, text in spans:
        Span.parse(text, name)
    for name in INTERVALS:
        parse_interval(str(getattr(config.run, name)), name)


def _check_bounds(group: Any, network: str = "") -> None:
    for f in fields(group):
        value, bounds = getattr(group, f.name), dict(f.metadata.get("bounds", {}))
        limit = (TOO_LARGE_FOR_RUN if isinstance(group, RunSettings) else TOO_LARGE).get(type(value))
        if limit and abs(value) >= limit:
            bounds.setdefault(*("below", limit) if value > 0 else ("above", -limit))
        if all(BOUNDS[words](value, limit) for words, limit in bounds.items()):
            continue
        shown = f"{value:g}" if isinstance(value, float) else value
        as_flag = f.name in FLAGS and not network
        name = f"--{f.name.replace('_', '-')} " if as_flag else f"{network}.{f.name}=".lstrip(".")
        raise UserError(f"{name}{shown}: must be {' and '.join(f'{words} {limit}' for words, limit in bounds.items())}")
