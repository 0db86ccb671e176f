"""Reads small untrusted files. Only regular files are read, with limits on size and nesting depth."""

from __future__ import annotations

import errno
import json
import os
import stat
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

MAX_BYTES = 2**24  # maximum size of a file to read
MAX_TOML_BYTES = 2**18
MAX_DOTS = 200  # maximum number of dots per line of TOML, since parsing dotted keys takes quadratic time


def read_bounded(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file; raise OSError if it is too large or not a regular file."""
    with open_bounded(path, max_bytes) as file:
        content = file.read(min(os.fstat(file.fileno()).st_size, max_bytes) + 1)
    if len(content) > max_bytes:  # the file has grown
        raise OSError(errno.EFBIG, f"larger than {max_bytes:,} bytes", str(path))
    return content


@contextmanager
def open_bounded(path: Path, max_bytes: int = MAX_BYTES) -> Iterator[BufferedReader]:
    """Open a regular file for reading; raise OSError if it is too large or not a regular file."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # without O_NONBLOCK, opening a pipe would block
    try:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if found.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"larger than {max_bytes:,} bytes", str(path))
        with os.fdopen(opened, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(opened)


def parse_json(content: bytes | str) -> Any:
    """Return a parsed JSON document; raise ValueError if it is invalid or nested too deeply."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_toml(content: bytes | str) -> dict[str, Any]:
    """Return a parsed TOML document; raise ValueError if it is invalid, too large or nested too deeply."""
    text = content.decode() if isinstance(content, bytes) else content
    if len(text) > MAX_TOML_BYTES:
        raise ValueError(f"larger than {MAX_TOML_BYTES:,} characters")
    if any(line.count(".") > MAX_DOTS for line in text.splitlines()):
        raise ValueError(f"a line has more than {MAX_DOTS} dots")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file, or an empty dict if the file cannot be read or contains no object."""
    try:
        content = parse_json(read_bounded(path))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def why(error: Exception) -> str:
    """Return why a file cannot be read, on one line and without the file name."""
    return " ".join(str(getattr(error, "strerror", None) or error).split())
