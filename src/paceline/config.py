"""From what was said to a checked config, in one namespace of settings.

A value comes from the last of these that gives it: the settings' defaults, the recipe's defaults, the
preset, a file (TOML or INI), flags, `--set name=value`. Learner settings can be given for one network
(`discriminator.lr`). The settings that were resolved are kept with the run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from paceline.errors import UserError, unknown
from paceline.settings import BOUNDS, LearnerSettings, RunSettings
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


def resolve(recipe_name: str, recipe_settings: type, layers: Iterable[tuple[str, Mapping[str, Any]]]) -> Config:
    """One config from layers of (where it comes from, {name: value}); the last one wins."""
    groups = (RunSettings, LearnerSettings, recipe_settings)
    owner = {f.name: group for group in groups for f in fields(group)}
    hints = {name: get_type_hints(group)[name] for name, group in owner.items()}
    chosen: dict[type, dict[str, Any]] = {group: {} for group in groups}
    networks: dict[str, dict[str, Any]] = {}
    for origin, layer in layers:
        for full_name, value in flatten(layer).items():
            network, _, name = full_name.rpartition(".")
            name = name.replace("-", "_")
            if name not in owner:
                where = "" if origin == "flag" else f"{origin}: "
                raise UserError(f"{where}{unknown('setting', name, owner)}")
            said = f"--{full_name.replace('_', '-')}" if origin == "flag" else f"{origin} {full_name}"
            parsed = convert(value, hints[name], said)
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
        RunSettings(**chosen[RunSettings]),
        LearnerSettings(**chosen[LearnerSettings]),
        networks,
        recipe_settings(**chosen[recipe_settings]),
    )
    _check(config)
    return config


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
