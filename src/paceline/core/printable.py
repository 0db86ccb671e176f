"""Makes untrusted text safe to print, so that it cannot move the cursor, hide text or start a new line."""

from __future__ import annotations

import codecs
import os
import re
import sys
import textwrap
from functools import partial
from os import PathLike, fspath
from typing import TextIO

# Control characters, line and paragraph separators, characters that change the text direction, and surrogates, which
# represent bytes that are not UTF-8.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

# Replacements for characters that a stream cannot encode, such as an arrow in a Latin-1 terminal.
_PLAIN = {"…": "...", "✓": "ok:", "✗": "failed:", "→": "->", "←": "<-", "×": "x", "÷": "/", "≤": "<=", "≥": ">="}
_PLAIN |= {"−": "-", "–": "-", "—": "-", "±": "+-", "\u00a0": " "}
_NARROWEST = 20  # columns; text is not wrapped to fewer


def printable(text: str | PathLike[str]) -> str:
    """Return text or a path as one line, with control characters escaped, e.g. as `\\x1b`."""
    return _UNSAFE.sub(_escape, fspath(text))


def printable_lines(text: str) -> str:
    """Return text with all control characters escaped except line breaks and tabs."""
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))


def print_line(text: str, file: TextIO | None = None) -> None:
    """Print text from a file or the user as one line, with control characters escaped.

    On a terminal, a long line is wrapped between words, because the terminal itself would break inside a word. A stream
    that also logs its lines has a method `write_line`, which logs the line without these breaks.
    """
    stream, line = file or sys.stdout, printable(text)
    write_line = getattr(stream, "write_line", None)
    if write_line:
        write_line(line)
        stream.flush()
    else:
        print(wrapped(line, stream), file=stream, flush=True)


def wrapped(line: str, stream: TextIO) -> str:
    """Return a line with breaks between words if the stream is a terminal; further lines are indented.

    Two spaces separate items, such as `loss 1.234` and `top1 93.12%`. An item is not broken if it fits on a line.
    """
    columns = columns_of(stream) if stream.isatty() else 0
    if columns < _NARROWEST or len(line) <= columns:
        return line
    margin = " " * (len(line) - len(line.lstrip()))
    wrap = partial(textwrap.wrap, width=columns, break_long_words=False, break_on_hyphens=False)
    lines: list[str] = []
    for item in re.split(" {2,}", line.strip()):
        if lines and len(lines[-1]) + 2 + len(item) <= columns:
            lines[-1] += f"  {item}"
        else:
            indent = f"{margin}  " if lines else margin
            lines += wrap(item, initial_indent=indent, subsequent_indent=f"{margin}  ")
    return "\n".join(lines)


def columns_of(stream: TextIO) -> int:
    """Return the width of a terminal; 0 if it is unknown."""
    if os.environ.get("COLUMNS", "").isdecimal():
        return int(os.environ["COLUMNS"])
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0


def print_any_text() -> None:
    """Replace or escape characters that stdout or stderr cannot encode, instead of raising an error."""
    codecs.register_error("paceline", _replace_unencodable)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="paceline")


def _replace_unencodable(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    if error.object[error.start] in _PLAIN:
        return _PLAIN[error.object[error.start]], error.start + 1
    one = UnicodeEncodeError(error.encoding, error.object, error.start, error.start + 1, error.reason)
    return codecs.backslashreplace_errors(one)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:  # a surrogate that represents a byte
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
