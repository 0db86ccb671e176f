"""Panel names. Panels are aligned images of the same scene: an input and its targets."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.settings import setting
from paceline.config.source_flags import SeparateTestFolder
from paceline.contracts.data_spec import INPUT, LEFT_OUT
from paceline.core.errors import UserError

TARGET = "target"  # default name of the second of two panels
RESERVED = ("label", "index", "uniforms")  # other fields of a batch


@dataclass(frozen=True)
class PanelSettings(SeparateTestFolder):
    """Settings for sources whose files are rows of panels (aligned images)."""

    panels: str = setting(
        "",
        "comma-separated panel names, left to right: image is the input, segmentation is a mask, - skips a panel",
    )


def parse_panels(text: str) -> tuple[str, ...]:
    """Return the panel names from left to right; raise UserError if they are not valid."""
    if not text:
        return ()
    names = tuple(word.strip() for word in text.split(","))
    named = [name for name in names if name != LEFT_OUT]
    if named.count(INPUT) != 1 or len(named) < 2 or len(set(named)) < len(named):
        raise UserError(f"panels={text}: give each panel a unique name, and call the input {INPUT!r}")
    invalid = [name for name in named if not name.isidentifier()]
    if invalid:
        raise UserError(f"panels={text}: {invalid[0]!r} is not a valid name; use letters, digits and _")
    reserved = [name for name in named if name in RESERVED]
    if reserved:
        raise UserError(f"panels={text}: {reserved[0]!r} is the name of another field; choose a different name")
    return names
