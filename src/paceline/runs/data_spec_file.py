"""What a recipe was told of its data, kept with what it learned: enough to build it again without the data."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from paceline.contracts.recipe import Facts

FACTS = "facts.json"


def to_json(facts: Facts) -> str:
    """The facts as text."""
    return json.dumps(dataclasses.asdict(facts), ensure_ascii=False)


def from_json(text: str) -> Facts:
    """The facts that a text holds."""
    values = json.loads(text)
    for name in ("class_names", "panels"):
        values[name] = tuple(values[name])
    return Facts(**values)


def keep_facts(run: Path, facts: Facts) -> None:
    """Writes them into a run's folder."""
    beside = run / f"{FACTS}.writing"
    beside.write_text(to_json(facts))
    beside.rename(run / FACTS)


def kept_facts(run: Path) -> Facts | None:
    """Those of a run; None where it keeps none, or keeps them in another way."""
    try:
        return from_json((run / FACTS).read_text())
    except (OSError, ValueError, KeyError, TypeError):
        return None
