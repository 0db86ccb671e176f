"""Resolve layers of settings, including tables of named values, into one checked config."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from paceline.config.flags import ALIASES, FLAGS
from paceline.config.settings import (
    BOUNDS,
    INTERVALS,
    RETIRED,
    SHARED_SETTINGS,
    HasSettings,
    LearnerSettings,
    RunSettings,
    Span,
    parse_interval,
)
from paceline.core.errors import UnknownSetting, UserError, unknown
from paceline.core.registry import is_path, load_class, names
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


def resolve(
    recipe_name: str,
    recipe_class: type[Recipe],
    layers: Iterable[tuple[str, SettingValues]],
    *,
    load_source: bool = True,
) -> Config:
    """Merge layers of (origin, {name: value}) into one config; later layers override earlier ones.

    If `load_source` is false, a source in the user's own .py file is not imported, and its settings are left out.
    """
    layers = list(layers)
    named = [RunSettings.data, *(str(layer["data"]) for _, layer in layers if "data" in layer)]
    source, is_left_out = named[-1], is_path(named[-1]) and not load_source
    run, recipe = RunSettings if is_left_out else settings_of(source), recipe_class.Settings
    groups: tuple[type[Any], ...] = (run, LearnerSettings, recipe)
    owners = {f.name: group for group in groups for f in fields(group)}
    hints = {name: hint for group in groups for name, hint in get_type_hints(group).items() if name in owners}
    _check_names(source, run, recipe_name, recipe)
    # The settings that a .py file declares are unknown until the file is imported.
    has_unknown_source = any(is_path(one) and (one != source or is_left_out) for one in named)
    values: dict[str, SettingValue] = {}
    tables: dict[str, dict[str, SettingValue]] = {}
    networks: dict[str, dict[str, SettingValue]] = {}
    for origin, layer in layers:
        for full_name, value in flatten(layer).items():
            network, _, name = full_name.rpartition(".")
            name = plain_name(name)
            is_flag = plain_name(full_name) in FLAGS or full_name not in owners
            shown = f"--{full_name.replace('_', '-')}" if is_flag else full_name
            shown = shown if origin == "flag" else f"{origin} {full_name}"
            if hints.get(plain_name(network)) is Arguments:
                tables.setdefault(plain_name(network), {})[name] = argument_value(value, shown)
            elif name not in owners:
                if name in RETIRED and origin != "flag" and not origin.startswith("--"):
                    continue  # in the folder of an older run
                others = source_settings()
                if isinstance(layer, Inherited) and (has_unknown_source or name in others):
                    continue
                if name not in others:
                    raise _unknown(name, origin, recipe_name, recipe_class, {*owners, *others})
                belongs = f"{shown} belongs to source {' or '.join(others[name])}"
                raise UserError(f"{belongs}, but --data is {source!r}; leave it out")
            elif not network:
                values[name] = convert(value, hints[name], shown)
                for single in networks.values():  # which the value for all networks overrides
                    single.pop(name, None)
            elif owners[name] is not LearnerSettings:
                raise UserError(
                    f"{origin}: {name!r} applies to the whole run and cannot be set for network {network!r} alone"
                )
            else:
                networks.setdefault(network, {})[name] = convert(value, hints[name], shown)
    chosen: dict[str, Any] = values | {name: Arguments(entries) for name, entries in tables.items()}
    made = [group(**{name: value for name, value in chosen.items() if owners[name] is group}) for group in groups]
    networks = {network: single for network, single in networks.items() if single}
    config = Config(recipe_name, recipe_class, made[0], made[1], networks, made[2])
    _check(config)
    return config


def _check_names(source: str, run: type[RunSettings], recipe_name: str, recipe: type[Any]) -> None:
    """Raise UserError if a source or a recipe declares a setting with the name of another setting."""
    taken = {f.name for group in (LearnerSettings, recipe) for f in fields(group)}
    hidden = next((f.name for f in own_fields(run) if f.name in taken), "")
    if hidden:
        raise UserError(
            f"source {source!r}: setting {hidden!r} clashes with a setting in the recipe or its networks; rename it"
        )
    clash = next((f.name for f in fields(recipe) if f.name in SHARED_SETTINGS), "")
    if clash:
        raise UserError(
            f"recipe {recipe_name!r}: setting {clash!r} clashes with a setting that every run has; rename it"
        )


def _unknown(name: str, origin: str, recipe_name: str, recipe: type[Recipe], known: Iterable[str]) -> UserError:
    """Return the error for a setting that neither this run nor any source has."""
    advice, listed_by = recipe.other_names.get(name, ""), f"`paceline settings {recipe_name}`"
    error = unknown("setting", name, known, meant=ALIASES.get(name), listed_by=listed_by)
    text = f"unknown setting {name!r}: {advice}" if " " in advice else str(error)
    return UnknownSetting(text if origin == "flag" else f"{origin}: {text}", origin)


def settings_of(source: str) -> type[RunSettings]:
    """Return a source's settings class; raise UserError if it is not valid."""
    settings = load_class("source", source, HasSettings).Settings
    extends = isinstance(settings, type) and issubclass(settings, RunSettings)
    if not extends or "__dataclass_fields__" not in vars(settings):
        raise UserError(f"source {source!r}: its Settings must be a frozen @dataclass that extends RunSettings")
    return settings


def source_settings() -> dict[str, list[str]]:
    """Return, for each setting that only some sources have, the quoted names of those sources."""
    owners: dict[str, list[str]] = {}
    for source in names("source"):
        with suppress(UserError):  # skip a broken plugin; `paceline settings` reports it
            for f in own_fields(settings_of(source)):
                owners.setdefault(f.name, []).append(repr(source))
    return owners


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
