"""Panels: several images of one thing, an input and what should be made of it; how they are named and ordered."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.settings import setting
from paceline.config.source_flags import SeparateTestFolder
from paceline.contracts.data_spec import INPUT, LEFT_OUT
from paceline.core.errors import UserError

TARGET = "target"  # the other panel where there are two


@dataclass(frozen=True)
class PanelSettings(SeparateTestFolder):
    """The panels of a row."""

    panels: str = setting(
        "",
        "names of the panels in a row, with commas: image is the input, - leaves one out, segmentation comes last",
    )


def parse_panels(text: str) -> tuple[str, ...]:
    """Return the panels from left to right; raise UserError for names that cannot be used."""
    if not text:
        return ()
    names = tuple(word.strip() for word in text.split(","))
    named = [name for name in names if name != LEFT_OUT]
    if named.count(INPUT) != 1 or len(named) < 2 or len(set(named)) < len(named):
        raise UserError(f"panels={text}: give every panel a name of its own, and call the input {INPUT!r}")
    invalid = [name for name in named if not name.isidentifier()]
    if invalid:
        raise UserError(f"panels={text}: {invalid[0]!r} is not a valid name; use letters, digits and _")
    return names
