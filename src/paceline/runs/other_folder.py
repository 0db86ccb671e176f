"""Suggest a run folder for a run whose settings differ from those of the run in the chosen folder."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from itertools import count
from pathlib import Path

from paceline.config.resolve import Config

DEFAULT_PARENT = Path("runs")  # the folder of runs that have no `--out`
MAX_SETTINGS, MAX_LENGTH = 3, 60  # limits for the part that is added to the name


def suggest_other_folder(path: Path, config: Config, changed: Iterable[str] = ()) -> str:
    """Return the flag that starts another run: `--name NAME`, or `--out FOLDER` if the folder is not in runs/.

    The name is that of the existing run, followed by the changed settings (`name: old → new`) or else by a number.
    """
    stages = [stage for names in config.recipe_class.stages.values() for stage in names]
    run = path.parent if path.name in stages else path  # a stage is a subfolder of its run
    words = [f"{one.partition(': ')[0]}-{one.rpartition(' → ')[2]}" for one in list(changed)[:MAX_SETTINGS]]
    added = re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(words))[:MAX_LENGTH].strip("-.")
    base = f"{run.name}-{added}" if added else run.name
    candidates = (base if number == 1 and added else f"{base}-{number}" for number in count(1 if added else 2))
    name = next(name for name in candidates if not (run.parent / name).exists())
    if run.parent == DEFAULT_PARENT:
        return f"--name {shlex.quote(name)}"
    return f"--out {shlex.quote(str(run.parent / name))}"
