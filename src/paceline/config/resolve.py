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
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, get_origin, get_type_hints

from paceline.config.settings import ALSO_CALLED, BOUNDS, LearnerSettings, RunSettings
from paceline.config.spans import Span
from paceline.core.errors import UserError, unknown
from paceline.core.registry import is_path

if TYPE_CHECKING:
    from paceline.contracts.recipe import Recipe


@dataclass(frozen=True)
class Config:
    """All settings of one run, resolved."""

    recipe_name: str
    recipe_class: type[Recipe]
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


class SourceSettings(Protocol):
    """The settings that sources add to those of every run."""

    def of(self, source: str) -> type[RunSettings]:
        """Return the settings class of a source."""

    def owners(self) -> dict[str, list[str]]:
        """Return, for every setting that only some sources have, the names of these sources in quotes."""


def resolve(
    recipe_name: str,
    recipe_class: type[Recipe],
    layers: Iterable[tuple[str, Mapping[str, Any]]],
    sources: SourceSettings,
    *,
    own_source: bool = True,
) -> Config:
    """Merge layers of (origin, {name: value}) into one config; the last layer wins.

    Without `own_source`, a source that is a user's own file is not imported and the settings it adds are left out.
    """
    layers, recipe_settings = list(layers), recipe_class.Settings
    named = [RunSettings.data, *(str(layer["data"]) for _, layer in layers if "data" in layer)]
    source, is_left_out = named[-1], is_path(named[-1]) and not own_source
    run_settings = RunSettings if is_left_out else sources.of(source)
    # What a file that is not run calls its settings cannot be known.
    has_unknown_source = any(is_path(one) and (one != source or is_left_out) for one in named)
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
                others = sources.owners()
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
        recipe_class,
        run_settings(**chosen[run_settings]),
        LearnerSettings(**chosen[LearnerSettings]),
        networks,
        recipe_settings(**chosen[recipe_settings]),
    )
    _check(config)
    return config


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
        spans += [(name, getattr(learner, name)) for name in ("warmup", "hold", "ema_half_life")]
        spans += [("milestones", one) for one in learner.milestones.split(",")]
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
