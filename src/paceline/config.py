"""From what was said to a checked config, in one namespace of settings.

A value comes from the last of these that gives it: the settings' defaults, the recipe's defaults, the
preset, a file (TOML or INI), flags, `--set name=value`. Learner settings can be given for one network
(`discriminator.lr`). Which settings a run has depends on its recipe and on its source. Those that were resolved
are kept with the run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from paceline.errors import UserError, unknown
from paceline.registry import is_path, load_class, names
from paceline.settings import ALSO_CALLED, BOUNDS, HasSettings, LearnerSettings, RunSettings
from paceline.span import Span


@dataclass(frozen=True)
class Config:
    """All settings of one run, resolved."""

    recipe_name: str
    run: RunSettings
    learner: LearnerSettings
    networks: dict[str, dict[str, Any]]  # learner settings of single networks
    recipe: Any  # the recipe's own dataclass

    def learner_of(self, network: str) -> LearnerSettings:
        """How one network learns."""
        return dataclasses.replace(self.learner, **self.networks.get(network, {}))

    def values(self) -> dict[str, Any]:
        """Every setting by its full name, in the order of declaration."""
        flat: dict[str, Any] = {"recipe": self.recipe_name}
        for group in (self.run, self.learner, self.recipe):
            flat |= dataclasses.asdict(group)
        for network, chosen in self.networks.items():
            flat |= {f"{network}.{name}": value for name, value in chosen.items()}
        return flat

    def with_run(self, **changes: Any) -> Config:
        """The same settings with some of the run's replaced."""
        return dataclasses.replace(self, run=dataclasses.replace(self.run, **changes))


class Inherited(dict[str, Any]):
    """A layer that was not said for this run, but by its recipe or for a run that kept it.

    What it has for a source that this run does not use is passed over.
    """


def resolve(
    recipe_name: str,
    recipe_settings: type,
    layers: Iterable[tuple[str, Mapping[str, Any]]],
    *,
    own_source: bool = True,
) -> Config:
    """One config from layers of (where it comes from, {name: value}); the last one wins.

    Without `own_source` a person's own source file is not run, and the settings that it adds are left out.
    """
    layers = list(layers)
    sources = [RunSettings.data, *(str(layer["data"]) for _, layer in layers if "data" in layer)]
    source, is_left_out = sources[-1], is_path(sources[-1]) and not own_source
    run_settings = RunSettings if is_left_out else source_settings(source)
    # What a file that is not run calls its settings cannot be known.
    has_unknown_source = any(is_path(one) and (one != source or is_left_out) for one in sources)
    groups = (run_settings, LearnerSettings, recipe_settings)
    owner = {f.name: group for group in groups for f in fields(group)}
    hidden = next((f.name for f in own_fields(run_settings) if owner[f.name] is not run_settings), "")
    if hidden:
        raise UserError(f"source {source!r}: its setting {hidden!r} is one of the recipe or of learners; rename it")
    hints = {group: get_type_hints(group) for group in groups}
    chosen: dict[type, dict[str, Any]] = {group: {} for group in groups}
    networks: dict[str, dict[str, Any]] = {}
    for origin, layer in layers:
        for full_name, value in flatten(layer).items():
            network, _, name = full_name.rpartition(".")
            name = name.replace("-", "_")
            said = f"--{full_name.replace('_', '-')}" if origin == "flag" else f"{origin} {full_name}"
            if name not in owner:
                others = settings_of_sources()
                if isinstance(layer, Inherited) and (has_unknown_source or name in others):
                    continue
                if name in others:
                    raise UserError(f"{said} belongs to source {' or '.join(others[name])}; --data is {source!r}")
                where = "" if origin == "flag" else f"{origin}: "
                every, listed_by = {*owner, *others}, f"`paceline settings {recipe_name}`"
                meant = ALSO_CALLED.get(name)
                raise UserError(f"{where}{unknown('setting', name, every, meant=meant, listed_by=listed_by)}")
            parsed = convert(value, hints[owner[name]][name], said)
            if not network:
                chosen[owner[name]][name] = parsed
                for single in networks.values():  # said later for all, it holds for all
                    single.pop(name, None)
            elif owner[name] is not LearnerSettings:
                raise UserError(f"{origin}: {name!r} belongs to the whole run, not to network {network!r}")
            else:
                networks.setdefault(network, {})[name] = parsed
    networks = {network: values for network, values in networks.items() if values}
    config = Config(
        recipe_name,
        run_settings(**chosen[run_settings]),
        LearnerSettings(**chosen[LearnerSettings]),
        networks,
        recipe_settings(**chosen[recipe_settings]),
    )
    _check(config)
    return config


def source_settings(source: str) -> type[RunSettings]:
    """The settings of runs on a source: those of every run, and its own."""
    found = load_class("source", source, HasSettings).Settings
    extends = isinstance(found, type) and issubclass(found, RunSettings)
    if not extends or "__dataclass_fields__" not in vars(found):
        raise UserError(f"source {source!r}: its Settings must be a frozen @dataclass that extends RunSettings")
    return found


def settings_of_sources() -> dict[str, list[str]]:
    """Every setting that not all runs have, with the sources of a name that have it, in quotes."""
    found: dict[str, list[str]] = {}
    for source in names("source"):
        for f in own_fields(source_settings(source)):
            found.setdefault(f.name, []).append(repr(source))
    return found


def own_fields(run_settings: type[RunSettings]) -> list[dataclasses.Field[Any]]:
    """The settings that a source adds."""
    return [f for f in fields(run_settings) if f.name not in RunSettings.__dataclass_fields__]


def flatten(layer: Mapping[str, Any]) -> dict[str, Any]:
    """A layer by full names: the settings of a network's own table as `network.name`."""
    flat: dict[str, Any] = {}
    for name, value in layer.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{inner}": v for inner, v in value.items()}
        elif name != "recipe":
            flat[name] = value
    # What is said of one network comes after what is said of all.
    return dict(sorted(flat.items(), key=lambda item: "." in item[0]))


def convert(value: Any, hint: Any, where: str) -> Any:
    """A value as the type of its setting, from text where it comes from a person."""
    if get_origin(hint) is Literal:
        text = {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else str(value)
        if text not in get_args(hint):
            raise UserError(f"{where}: {unknown('value', str(text), get_args(hint))}")
        return text
    try:
        if hint is bool:
            return {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}[str(value).lower()]
        if hint is int:
            return _whole(value)
        if hint is float and not math.isfinite(float(value)):
            raise ValueError
        return hint(value)
    except (ValueError, OverflowError, KeyError, TypeError):
        raise UserError(f"{where}: {value!r} is not {_kind(hint)}") from None


def _whole(value: Any) -> int:
    """A whole number to its last digit, also where it is written like 5e4."""
    try:
        return int(str(value))
    except ValueError:
        number = float(value)
        if number != int(number):
            raise
        return int(number)


def _kind(hint: Any) -> str:
    return {bool: "true or false", int: "a whole number", float: "a number"}.get(hint, "a text")


def _check(config: Config) -> None:
    run = config.run
    spans = [(name, getattr(run, name)) for name in ("log_every", "evaluate_every", "sample_every", "save_every")]
    _check_bounds(run)
    _check_bounds(config.recipe)
    for network in ("", *config.networks):
        learner = config.learner_of(network)
        _check_bounds(learner, network)
        spans += [(name, getattr(learner, name)) for name in ("warmup", "hold", "average")]
        spans += [("drop_at", one) for one in learner.drop_at.split(",")]
    for name, text in spans:
        Span.parse(text, name)


def _check_bounds(group: Any, network: str = "") -> None:
    for f in fields(group):
        value, bounds = getattr(group, f.name), f.metadata.get("bounds", {})
        if all(BOUNDS[words](value, limit) for words, limit in bounds.items()):
            continue
        shown = f"{value:g}" if isinstance(value, float) else value
        as_flag = f.metadata["flag"] and not network
        name = f"--{f.name.replace('_', '-')} " if as_flag else f"{network}.{f.name}=".lstrip(".")
        raise UserError(f"{name}{shown}: must be {' and '.join(f'{words} {limit}' for words, limit in bounds.items())}")
