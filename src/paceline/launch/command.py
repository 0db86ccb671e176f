"""The `paceline train` command that each host in a job runs, with the arguments that the user passed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paceline.config.files import parse_assignments
from paceline.core.errors import UserError
from paceline.core.text import has_credentials, redact
from paceline.core.types import SettingValue
from paceline.launch.child import to_arguments

SET_BY_LAUNCH = ("devices", "nnodes", "rdzv", "join_timeout")


@dataclass(frozen=True)
class TrainCommand:
    """What to train, on how many hosts, and on how many devices per host."""

    recipe: str
    flags: Mapping[str, SettingValue]  # settings by name, as passed on the command line
    config_file: str
    assignments: tuple[str, ...]
    nodes: int
    devices: int  # number of devices per host
    join_timeout: float

    def words(self, rdzv: str, **changes: str) -> list[str]:
        """Return the command for one host; `changes` are flags that replace the user's, such as `--out`."""
        replaced = {*SET_BY_LAUNCH, *changes}
        flags = {name: value for name, value in self.flags.items() if name not in replaced}
        assignments = [one for one in self.assignments if not replaced & settings_in([one]).keys()]
        assignments.append(f"join_timeout={self.join_timeout:g}")
        topology = ["--devices", str(self.devices), "--nnodes", str(self.nodes), "--rdzv", rdzv]
        return ["train", self.recipe, *to_arguments({**flags, **changes}, self.config_file, assignments), *topology]


def settings_in(assignments: Iterable[str]) -> dict[str, str]:
    """Return the settings in `--set` arguments by name."""
    return {name.replace("-", "_"): value for name, value in parse_assignments(assignments).items()}


def quoted(words: Iterable[str]) -> str:
    """Quote words for a shell so that nothing in them is expanded; each flag starts on a new line."""
    lines = [""]
    for word in words:
        if word.startswith("--"):
            lines.append("")
        lines[-1] += f" {shlex.quote(word)}" if lines[-1] else shlex.quote(word)
    return " \\\n    ".join(lines)


def plain_name(text: str) -> str:
    """Return a name that schedulers accept: at most 40 lowercase letters, digits and hyphens."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].rstrip("-")
    return name if name[:1].isalpha() else f"run-{name}"[:40].rstrip("-")


def check_words(words: Iterable[str]) -> None:
    """Raise UserError for arguments that must not appear in a job file: credentials and control characters."""
    for word in words:
        if any(ord(character) < 32 for character in word):
            raise UserError(f"{word!r}: a job file cannot contain line breaks or control characters")
        if has_credentials(word):
            raise UserError(
                f"{redact(word)}: contains a credential, which does not belong in a job file; set it in the environment"
            )
