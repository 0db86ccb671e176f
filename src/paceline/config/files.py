"""Read settings from files and `name=value` arguments, and write a run's config; no file names code to run."""

from __future__ import annotations

import configparser
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields

from paceline.config.resolve import Config, Inherited, Layer, Text, flatten, plain_name
from paceline.config.settings import RETIRED
from paceline.core.errors import UserError
from paceline.core.files import MAX_TOML_BYTES, checksum_of_content, parse_toml, read_bounded, user_path, why
from paceline.core.trust import check_may_run, trusts_files
from paceline.core.types import Scalar, SettingValue, SettingValues

PLUGIN_SETTINGS = ("data", "loader", "strategy", "loggers")  # their values are plugin names or paths to .py files
TRUSTING_SETTING = "inception_sha256"  # this setting allows the code in a TorchScript file to run


def check_named_code(
    origin: str, settings: SettingValues, overriding: Iterable[SettingValues] = (), *, trust: bool = False
) -> None:
    """Raise UserError if settings in a file refer to untrusted code, unless settings in `overriding` replace them."""
    replaced = {plain_name(name) for layer in overriding for name in layer}
    check_may_run(origin, _plugins({name: settings[name] for name in settings if name not in replaced}), trust=trust)


def check_trusting_setting(origin: str, settings: SettingValues) -> None:
    """Raise UserError if a settings file contains a setting that allows a file to run code."""
    given = {plain_name(name): value for name, value in settings.items()}
    if given.get(TRUSTING_SETTING) and not trusts_files():
        raise UserError(
            f"{origin}: sets {TRUSTING_SETTING}, which allows code to run; set it on the command line, or use --trust"
        )


def _plugins(settings: SettingValues) -> Iterator[str]:
    for name in PLUGIN_SETTINGS:
        yield from (one.strip() for one in str(settings.get(name, "")).split(","))


RUN_FORMAT = 2
FORMAT = "format"  # key of the format version in each file
FIRST_FORMAT = 1  # format version of files without this key


def check_format(found: object, where: str, remedy: str = "train it again") -> None:
    """Raise UserError unless `found` is the format version that Paceline reads; the message starts with `where`."""
    version = FIRST_FORMAT if found is None else found
    if str(version) != str(RUN_FORMAT):
        raise UserError(
            f"{where}: run format {version}, but this version of Paceline reads format {RUN_FORMAT}: "
            f"{remedy}, or use the version that wrote it"
        )


PROVENANCE = "provenance"  # table in a run's config.toml with the format, versions and hardware rather than settings
# Locations that a new run must not reuse, and the setting that allows code in a file to run.
NOT_INHERITED = ("out", "mirror", "resume_from", TRUSTING_SETTING)

Table = Mapping[str, SettingValue]


def read_file(path: str) -> Layer:
    """Return the settings in a TOML or INI file; the sections of an INI file share one namespace.

    The settings in another run's config.toml are `Inherited`, excluding that run's folder and mirror.
    """
    file = user_path(path)
    if not file.exists():
        raise UserError(f"--config {path}: no such file")
    if file.is_dir():
        raise UserError(f"--config {path}: a folder; use a TOML or INI file, such as the config.toml in a run folder")
    try:
        content = read_bounded(file, MAX_TOML_BYTES).decode("utf-8-sig")  # some editors write a byte order mark
        if file.suffix == ".ini":
            # A percent sign is part of a value, such as 50%, and [DEFAULT] is a section like any other.
            parser = configparser.ConfigParser(interpolation=None, default_section="")
            parser.read_string(content, path)
            return _ini_settings(parser, path)
        settings: dict[str, SettingValue | Table] = parse_toml(content)
    except UnicodeDecodeError:
        raise UserError(f"--config {path}: not a TOML or INI file; use a run's config.toml, or write one") from None
    except (OSError, ValueError, configparser.Error) as error:
        remedy = "" if file.suffix in (".toml", ".ini") else "; use a TOML or INI file"
        raise UserError(f"--config {path}: {why(error)}{remedy}") from None
    provenance = settings.pop(PROVENANCE, None)
    if not isinstance(provenance, Mapping):
        return settings
    check_format(provenance.get(FORMAT), f"--config {path}", "copy the settings that you need into a new file")
    return inherited(settings)


def _ini_settings(parser: configparser.ConfigParser, path: str) -> Layer:
    """Return the settings in all sections; raise UserError if two sections contain different values for a setting."""
    found: dict[str, tuple[str, str]] = {}  # section and value
    for section in parser.sections():
        for name, value in parser.items(section):
            other, before = found.setdefault(name, (section, value))
            if value != before:
                raise UserError(
                    f"{name} is {before} in [{other}] and {value} in [{section}], but sections of an "
                    "INI file have no meaning; to set values for a single network, use a TOML file"
                )
    return {name: Text(value) for name, (_, value) in found.items()}


def inherited(settings: SettingValues) -> Inherited:
    """Return the settings of a run that a new run may inherit."""
    return Inherited({name: value for name, value in settings.items() if plain_name(name) not in NOT_INHERITED})


def parse_assignments(assignments: Iterable[str]) -> dict[str, str]:
    """Parse `name=value` arguments into a dict of settings."""
    pairs: dict[str, str] = {}
    for word in assignments:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise UserError(f"--set {word}: expected name=value")
        if name.strip() == "recipe":
            as_argument = f"an argument, as in `paceline train {value.strip()}`"
            raise UserError(f"--set {word}: leave it out; the recipe is not a setting, but {as_argument}")
        pairs[name.strip()] = Text(value.strip())
    return pairs


def to_toml(settings: Table, provenance: Mapping[str, Scalar | list[Table]]) -> str:
    """Return settings as TOML that `--config` can read; a list in `provenance` becomes an array of tables."""
    tables: dict[str, dict[str, SettingValue]] = {"": {}}
    for full_name, value in settings.items():
        network, _, name = full_name.rpartition(".")
        tables.setdefault(network, {})[name] = value
    arrays = {name: value for name, value in provenance.items() if isinstance(value, list)}
    if provenance:
        tables[PROVENANCE] = {name: value for name, value in provenance.items() if not isinstance(value, list)}
    lines = [line for name, values in tables.items() for line in _table(f"[{name}]" if name else "", values)]
    lines += [
        line for name, array in arrays.items() for one in array for line in _table(f"[[{PROVENANCE}.{name}]]", one)
    ]
    return "\n".join(lines) + "\n"


def _table(header: str, values: Table) -> list[str]:
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
    return [f"\n{header}", *lines] if header else lines


def identity(config: Config, data: str) -> str:
    """Return a machine-independent hash of a run's data and of the settings that must not change on resume.

    Settings that have their default are left out, so that a setting added in a newer version does not change the hash.
    """
    mutable, defaults = _mutable_on_resume(config), _defaults(config)
    fixed = {
        name: value
        for name, value in _portable(config.values()).items()
        if name not in mutable and (name not in defaults or value != defaults[name])
    }
    return checksum_of_content([fixed, data])[:16]


def changed_settings(kept: SettingValues, now: Config) -> list[str]:
    """Return the forbidden changes to a resumed run's settings, as `name: old → new`.

    A setting that the run lacks, because an older version trained it, counts as its default.
    """
    before, after = _defaults(now) | _portable(flatten(kept)), _portable(now.values())
    del after["recipe"]
    mutable = _mutable_on_resume(now)
    names = [name for name in dict.fromkeys([*before, *after]) if name not in mutable and name not in RETIRED]
    pairs = [(name, _as_word(before.get(name)), _as_word(after.get(name))) for name in names]
    return [f"{name}: {_shown(was)} → {_shown(is_now)}" for name, was, is_now in pairs if was != is_now]


def _shown(value: SettingValue | None) -> str:
    return "''" if value == "" else str(value)


def _as_word(value: SettingValue | None) -> SettingValue | None:
    """Return "on" or "off" for a boolean, because a setting that was a boolean may now have more values."""
    return ("on" if value else "off") if isinstance(value, bool) else value


def _mutable_on_resume(config: Config) -> set[str]:
    return {f.name for f in fields(config.run) if f.metadata.get("mutable_on_resume")}


def _defaults(config: Config) -> dict[str, SettingValue]:
    """Return each setting's own default, which a recipe or a preset may override; tables have none."""
    groups, names = (config.run, config.learner, config.recipe), config.values()
    defaults = {f.name: f.default for group in groups for f in fields(group)}
    return {name: default for name, default in defaults.items() if name in names and default is not MISSING}


def _portable(values: dict[str, SettingValue]) -> dict[str, SettingValue]:
    """Make `init_from` relative to `out`, so that moving both folders does not count as a change."""
    start, out = str(values.get("init_from", "")), str(values.get("out", ""))
    return values | {"init_from": os.path.relpath(start, out)} if start and out else values
