"""The settings that sources add to the settings of every run."""

from __future__ import annotations

from paceline.config.resolve import own_fields
from paceline.config.settings import RunSettings
from paceline.core.errors import UserError
from paceline.core.registry import load_class, names
from paceline.data.source import Source


class RegisteredSources:
    """Settings of all registered sources, for `config.resolve`."""

    def of(self, source: str) -> type[RunSettings]:
        """Return a source's settings class; raise UserError if it is not valid."""
        found = load_class("source", source, Source).Settings
        extends = isinstance(found, type) and issubclass(found, RunSettings)
        if not extends or "__dataclass_fields__" not in vars(found):
            raise UserError(f"source {source!r}: its Settings must be a frozen @dataclass that extends RunSettings")
        return found

    def owners(self) -> dict[str, list[str]]:
        """Return, for each setting that only some sources have, the quoted names of those sources."""
        found: dict[str, list[str]] = {}
        for source in names("source"):
            try:
                own = own_fields(self.of(source))
            except UserError:  # skip a broken plugin; `paceline settings` reports it
                continue
            for f in own:
                found.setdefault(f.name, []).append(repr(source))
        return found
