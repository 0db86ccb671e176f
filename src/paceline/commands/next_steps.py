"""The commands that make sense after a run has finished, ready to be pasted into a shell."""

from __future__ import annotations

import shlex
from pathlib import Path

from paceline.config.resolve import Config
from paceline.core.installed import is_installed
from paceline.core.printable import printable
from paceline.core.registry import is_path
from paceline.inference.uses import Use, uses_of

ARGUMENTS: dict[Use, tuple[str, ...]] = {
    "predict": ("path/to/images",),
    "apply": ("path/to/images", "--out", "results"),
    "sample": (),
}


def next_steps(config: Config, run: Path) -> list[str]:
    """Return up to three commands: use the model, evaluate it, and watch the runs in a browser."""
    trust = ["--trust"] if is_path(config.recipe_name) or is_path(config.run.data) else []
    uses = list(uses_of(config.recipe_class))[:1]
    commands = [[use, str(run), *ARGUMENTS[use], *trust] for use in uses]
    commands += [["evaluate", str(run), *trust]] if config.recipe_class.evaluator else []
    commands += [["board", str(run.parent)]] if is_installed("uvicorn") else []
    return [shlex.join(["paceline", *words]) for words in commands]


def print_next_steps(config: Config, run: Path) -> None:
    """Print the commands, one per line; a long command is not wrapped, so that it can be pasted."""
    commands = next_steps(config, run)
    if commands:
        print("\n".join(["next:", *(f"  {printable(command)}" for command in commands)]), flush=True)
