"""Files that are whole or not there: written to a temporary file next to their target, synced, renamed.

Temporary files are created exclusively and links are never followed, so that a link in a folder from elsewhere cannot
make a command overwrite what it points to.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.core.errors import UserError

WRITING = ".writing"  # ends the name of a temporary file


@contextmanager
def replacing(target: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield an empty file next to `target` that takes its place when the block ends without an error.

    With `durable`, the content and the new name survive a power cut. Otherwise only a kill is harmless.
    """
    temporary = _create_temporary(target)
    try:
        yield temporary
        if durable:
            sync(temporary)
        os.replace(temporary, target)
        if durable:
            sync(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_file(target: Path, content: bytes | str, *, durable: bool = True) -> None:
    """Write a whole file in one step; what had the name before is replaced."""
    with replacing(target, durable=durable) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(target: Path, content: object, *, durable: bool = True, indent: int | None = None) -> None:
    """Write a JSON file in one step, making its folder where there is none."""
    target.parent.mkdir(parents=True, exist_ok=True)
    write_file(target, json.dumps(content, indent=indent, ensure_ascii=False) + "\n", durable=durable)


def read_json(path: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file; an empty one where the file is missing or holds something else."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def sync(path: Path) -> None:
    """Return when a file's content, or the names in a folder, are on the disk.

    A folder may be a link, since the user named it; a file may not.
    """
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECTORY if path.is_dir() else os.O_NOFOLLOW))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_append(path: Path) -> int:
    """Return the descriptor of a file to append to, made where there is none; raise UserError where it is a link."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise UserError(f"{path}: is a link, which is not followed: remove it") from None


def remove_leftovers(folder: Path, older_than_seconds: float = 0.0) -> None:
    """Remove the temporary files that a killed process left in a folder that only the caller writes to.

    Where other commands may write as well, leave young files alone: they may still be in use.
    """
    for leftover in folder.glob(f".*{WRITING}"):
        with suppress(FileNotFoundError):
            if time.time() - leftover.lstat().st_mtime >= older_than_seconds:
                leftover.unlink()


def check_new_file(out: str, suffixes: tuple[str, ...], *, overwrite: bool) -> Path:
    """Return the path that `--out` means; raise UserError for other suffixes and for a file that exists."""
    target = Path(out).expanduser()
    if target.suffix not in suffixes:
        raise UserError(f"--out {out}: expected a name that ends in {' or '.join(suffixes)}")
    if target.is_dir():
        raise UserError(f"--out {out}: is a folder; name a file")
    if os.path.lexists(target) and not overwrite:
        raise UserError(f"--out {out}: the file exists; --overwrite replaces it")
    return target


@contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """Yield a file to write that becomes `target`; an error of the file system names `--out`."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary:
            yield temporary
    except OSError as error:
        raise UserError(f"--out {target}: {error.strerror or error}") from None


def _create_temporary(target: Path) -> Path:
    while True:
        temporary = target.with_name(f".{secrets.token_hex(8)}{WRITING}")
        try:
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
        except FileExistsError:
            continue
        return temporary
