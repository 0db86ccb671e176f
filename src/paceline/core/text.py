"""Text for users: safe to print, without credentials, with readable numbers and durations."""

from __future__ import annotations

import codecs
import math
import os
import re
import reprlib
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, fields
from os import PathLike, fspath
from typing import TYPE_CHECKING, TextIO

from paceline.core.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

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
    if write_line := getattr(stream, "write_line", None):
        write_line(line)
        stream.flush()
    else:
        print(wrapped(line, stream), file=stream, flush=True)


def wrapped(line: str, stream: TextIO) -> str:
    """Return a line with breaks between words if the stream is a terminal; further lines are indented."""
    columns = columns_of(stream) if stream.isatty() else 0
    if columns < _NARROWEST or len(line) <= columns:
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


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


HIDDEN = "***"
MAX_LINE_LENGTH = 500  # maximum number of characters in an error message
_NAMES = (
    r"pass(?:word|wd|phrase)?|secret|token|credentials?|signature|sig"
    r"|(?:api|access|account|private)[_-]?key(?:[_-]?id)?"
)
# No pattern starts with a repetition, so matching takes time linear in the length of the text.
_IN_URL = re.compile(r"(?P<scheme>[a-z0-9+.-]://)(?P<who>[^\s/?#'\"]+)@", re.IGNORECASE)
_NAMED = re.compile(
    rf"(?P<name>(?:{_NAMES})['\"]?\s*(?:=|:)\s*)(?P<quote>['\"]?)(?P<value>[^\s&,;'\"}}\]]+)", re.IGNORECASE
)
_KEYS = re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\b(?:gh[pousr]_|hf_|glpat-|sk-)[A-Za-z0-9_-]{16,}")
_PRIVATE_NAME = re.compile(rf"(?:^|[_-])(?:{_NAMES})$", re.IGNORECASE)


def redact(text: str) -> str:
    """Return text with credentials hidden, such as `user:password@` in URLs, `token=…` and well-known key formats."""
    text = _IN_URL.sub(rf"\g<scheme>{HIDDEN}@", text)
    text = _NAMED.sub(rf"\g<name>\g<quote>{HIDDEN}", text)
    return _KEYS.sub(HIDDEN, text)


def has_credentials(text: str) -> bool:
    """Return whether a text contains credentials that `redact` would hide."""
    return redact(text) != text


def one_line(error: BaseException) -> str:
    """Return the type and message of an error on one line, without credentials."""
    message = " ".join(str(error).split()) or ("no answer in time" if isinstance(error, TimeoutError) else "")
    return redact(f"{type(error).__name__}: {message}".removesuffix(": ")[:MAX_LINE_LENGTH])


def is_private_name(name: str) -> bool:
    """Return whether a variable name, such as AWS_SECRET_ACCESS_KEY, suggests a credential."""
    return bool(_PRIVATE_NAME.search(name))


def reject_credentials(settings: Mapping[str, object]) -> None:
    """Raise UserError if a setting contains a credential; the message hides it."""
    for name, value in settings.items():
        if isinstance(value, str) and has_credentials(value):
            raise UserError(
                f"{name}: contains a credential ({redact(value)}), but settings are saved with the run; "
                "pass it through an environment variable or the service's own configuration file"
            )


def four_digits(value: float) -> str:
    """Return a number with four significant digits, such as 0.1230 or 12,350; very small numbers as 1.234e-07."""
    if not math.isfinite(value):
        return f"{value:g}"
    exponent = int(f"{value:.3e}".partition("e")[2]) if value else 0
    if not -5 < exponent < 9:
        return f"{value:.3e}"
    return f"{round(value, 3 - exponent):,.{max(0, 3 - exponent)}f}"


def rate(images_per_second: float) -> str:
    """Return a speed, such as `1,234 images/s`; slow speeds have decimals."""
    digits = 0 if images_per_second >= 100 else 1 if images_per_second >= 10 else 2
    return f"{images_per_second:,.{digits}f} images/s"


def epoch(images: int, total_images: int, epoch_images: int) -> str:
    """Return a position in epochs, such as `epoch 4.6/12`; a run of less than one epoch has more decimals."""
    now, total = images / epoch_images, total_images / epoch_images
    return f"epoch {now:.1f}/{f'{total:.1f}'.removesuffix('.0')}" if total >= 1 else f"epoch {now:.2g}/{total:.2g}"


def duration(seconds: float) -> str:
    """Return a duration as hours:minutes:seconds, or minutes:seconds below one hour; "?" if it is not known yet."""
    if seconds > 1e8:  # several years
        return "?"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


_VALUES = reprlib.Repr()
_VALUES.maxtuple = 3
_VALUES.maxstring = _VALUES.maxother = 80


def short_repr(instance: DataclassInstance) -> str:
    """Return `Name(field=value, …)` with long values shortened and without fields that have their default value."""
    shown = []
    for field in fields(instance):
        value = getattr(instance, field.name)
        if field.repr and (field.default is MISSING or value != field.default):
            shown.append(f"{field.name}={_VALUES.repr(value)}")
    return f"{type(instance).__name__}({', '.join(shown)})"
