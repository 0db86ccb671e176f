"""The binary structure of BigTIFF files: the header, and the directories that describe images."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

HEADER_BYTES = 16
BYTE, ASCII, SHORT, LONG, RATIONAL, LONG8, IFD8 = 1, 2, 3, 4, 5, 16, 18  # types of values
FORMATS = {BYTE: "B", ASCII: "B", SHORT: "H", LONG: "I", LONG8: "Q", IFD8: "Q"}

Value = bytes | Sequence[int]  # numbers, also as the bytes of the file


@dataclass(frozen=True)
class Directory:
    """The tags of one image: for each tag, a type and its values; a rational number has two values."""

    tags: Mapping[int, tuple[int, Value]]

    def encode(self, offset: int, following: int = 0) -> bytes:
        """Return the directory for a position in the file, with its values; `following` is the next one's position."""
        tags = sorted(self.tags.items())
        values_at = offset + 8 + 20 * len(tags) + 8
        entries, values = [], b""
        for tag, (kind, value) in tags:
            content = value if isinstance(value, bytes) else struct.pack(f"<{len(value)}{_format(kind)}", *value)
            count = len(content) // _num_bytes(kind)
            if len(content) <= 8:
                stored = content.ljust(8, b"\0")
            else:
                stored = struct.pack("<Q", values_at + len(values))
                values += content + b"\0" * (-len(content) % 8)
            entries.append(struct.pack("<HHQ", tag, kind, count) + stored)
        return struct.pack("<Q", len(tags)) + b"".join(entries) + struct.pack("<Q", following) + values


def encode_header(first: int) -> bytes:
    """Return the header of a file whose first directory is at this position."""
    return struct.pack("<2sHHHQ", b"II", 43, 8, 0, first)


def _format(kind: int) -> str:
    return "I" if kind == RATIONAL else FORMATS[kind]


def _num_bytes(kind: int) -> int:
    return 8 if kind == RATIONAL else struct.calcsize(f"<{FORMATS[kind]}")
