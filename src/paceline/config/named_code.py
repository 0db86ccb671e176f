"""Rejects settings files that would make Paceline run untrusted code; see `core.trust`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from paceline.config.resolve import plain_name
from paceline.core.errors import UserError
from paceline.core.trust import check_may_run, trusts_files
from paceline.core.types import SettingValues

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
