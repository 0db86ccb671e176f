"""Makes names of files, which can contain any bytes, safe to print."""

from __future__ import annotations

import unicodedata
from os import PathLike, fspath

ESCAPED_KINDS = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control and format (bidi) characters, surrogates, line separators
FIRST_ESCAPED_BYTE = 0xDC00  # a byte that is not valid UTF-8 is read as this plus its value
JOINERS = "\u200c\u200d"  # format characters that are part of words and emoji


def printable(name: str | PathLike[str]) -> str:
    """Return a name with control characters, bidi controls and undecodable bytes as \\xNN or \\uNNNN."""
    text = fspath(name)
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(character) for character in text)


def _escaped(character: str) -> str:
    if unicodedata.category(character) not in ESCAPED_KINDS or character in JOINERS:
        return character
    code = ord(character)
    if FIRST_ESCAPED_BYTE + 0x80 <= code <= FIRST_ESCAPED_BYTE + 0xFF:
        code -= FIRST_ESCAPED_BYTE
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
