"""The `paceline train` command that a job's hosts run, word by word, as a person gave it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import UserError
from paceline.core.secrets import has_credentials, redact

OURS = ("devices", "nnodes", "rdzv", "join_timeout")  # the launch says these


@dataclass(frozen=True)
class TrainCommand:
    """What to train, and in how many processes on each of how many hosts."""

    recipe: str
    flags: Mapping[str, Any]  # settings by name, as the command line has them
    config_file: str
    assignments: tuple[str, ...]
    nodes: int
    devices: int  # of each host
    join_timeout: float

    def words(self, rdzv: str, **changes: str) -> list[str]:
        """The command for one host; `changes` are flags that the place it runs at decides."""
        words = ["train", self.recipe]
        for name, value in {**{n: v for n, v in self.flags.items() if n not in OURS}, **changes}.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                words += [f"--{flag}", str(value)]
        words += ["--config", self.config_file] if self.config_file else []
        for assignment in self.assignments:
            words += ["--set", assignment]
        words += ["--set", f"join_timeout={self.join_timeout:g}", "--devices", str(self.devices)]
        return [*words, "--nnodes", str(self.nodes), "--rdzv", rdzv]


def quoted(words: Iterable[str], lead: str = "") -> str:
    """Words as a shell takes them, each for what it says: nothing in them is executed."""
    lines = [lead]
    for word in words:
        if word.startswith("--"):
            lines.append("")
        lines[-1] += f" {shlex.quote(word)}" if lines[-1] else shlex.quote(word)
    return " \\\n    ".join(lines)


def plain_name(text: str) -> str:
    """A name for schedulers from a path or any text: lower case letters, digits and hyphens, at most 40."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].rstrip("-")
    return name if name[:1].isalpha() else f"run-{name}".rstrip("-")


def check_words(words: Iterable[str]) -> None:
    """Refuses what no job file should hold: credentials, and characters that end a line."""
    for word in words:
        if any(ord(character) < 32 for character in word):
            raise UserError(f"{word!r}: a job file cannot hold line breaks or control characters")
        if has_credentials(word):
            raise UserError(
                f"{redact(word)}: holds a credential, and a job file is kept; give it through the job's environment"
            )
