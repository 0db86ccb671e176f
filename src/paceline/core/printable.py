"""Makes untrusted text safe to print, so that it cannot move the cursor, hide text or start a new line."""

from __future__ import annotations

import re
import sys
from os import PathLike, fspath
from typing import TextIO

# Control characters, line and paragraph separators, characters that change the text direction, and surrogates, which
# represent bytes that are not UTF-8.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str | PathLike[str]) -> str:
    """Return text or a path as one line, with control characters escaped, e.g. as `\\x1b`."""
    return _UNSAFE.sub(_escape, fspath(text))


def printable_lines(text: str) -> str:
    """Return text with all control characters escaped except line breaks and tabs."""
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))


def print_line(text: str, file: TextIO | None = None) -> None:
    """Print text from a file or the user as one line, with control characters escaped."""
    print(printable(text), file=file, flush=True)


def print_any_text() -> None:
    """Escape characters that stdout or stderr cannot encode, instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:  # a surrogate that represents a byte
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
