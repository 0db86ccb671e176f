"""Find the commands in the documentation: those in fenced bash or console blocks in README.md and docs/."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
NOT_RUN = re.compile(r"<!-- not run: (?P<reason>\S.*?) -->")
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)")
INLINE = re.compile(r"(?<!`)`(?P<code>[^`\n]+)`(?!`)")
ASSIGNMENT = re.compile(r"[A-Z_]+=")


@dataclass(frozen=True)
class Block:
    """A fenced code block. `reason` explains why its commands are not run, and is empty if they are run."""

    page: str
    line: int  # line number of the first code line, starting at 1
    language: str
    lines: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Command:
    """One command line in a block."""

    page: str
    line: int
    text: str  # the command without comments
    reason: str

    @cached_property
    def words(self) -> list[str]:
        """Return the words in the command, without leading environment variables."""
        words = shlex.split(self.text)
        while words and ASSIGNMENT.match(words[0]):
            words.pop(0)
        return words

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def blocks() -> Iterator[Block]:
    """Yield every fenced block on every page."""
    for path in PAGES:
        page = str(path.relative_to(ROOT))
        lines = path.read_text(encoding="utf-8").splitlines()
        number = 0
        while number < len(lines):
            fence = FENCE.match(lines[number])
            number += 1
            if not fence:
                continue
            start = number
            while not lines[number].strip().startswith("```"):
                number += 1
            indent = len(fence["indent"])
            body = tuple(line[indent:] for line in lines[start:number])
            marked = NOT_RUN.search(lines[start - 2]) if start >= 2 else None
            yield Block(page, start + 1, fence["language"], body, marked["reason"] if marked else "")
            number += 1


def commands() -> list[Command]:
    """Return all commands in bash and console blocks, with continuation lines joined and comments removed."""
    found = []
    for block in blocks():
        if block.language not in ("bash", "console"):
            continue
        pending, first = "", 0
        for number, line in enumerate(block.lines, start=block.line):
            if block.language == "console" and not pending:
                if not line.startswith("$ "):
                    continue  # this line is output, not a command
                line = line[2:]
            first = first if pending else number
            pending += line.removesuffix("\\")
            if line.endswith("\\"):
                continue
            text = shlex.join(shlex.split(pending, comments=True))
            if text:
                found.append(Command(block.page, first, text, block.reason))
            pending = ""
    return found


def inline_code() -> Iterator[tuple[str, str]]:
    """Yield the position and text of each inline code span outside fenced blocks."""
    for path in PAGES:
        inside = False
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if FENCE.match(line):
                inside = not inside
            elif not inside:
                for span in INLINE.finditer(line):
                    yield f"{path.relative_to(ROOT)}:{number}", span["code"]
