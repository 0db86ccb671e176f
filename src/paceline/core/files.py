"""Atomic file writes: write a temporary file alongside the target, sync it, then rename it to the target.

Temporary files are created exclusively and symbolic links are never followed. A link in an untrusted folder therefore
cannot make a command overwrite the file that it points to. Use `core.small_files` to read files in untrusted folders.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.core.errors import UserError, describe_limit

WRITING = ".writing"  # suffix of temporary files
SAFETENSORS = ".safetensors"  # suffix of files with tensors, such as weights


@contextmanager
def replacing(target: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield an empty temporary file, which replaces `target` if the block ends without an error.

    If `durable` is true, the new content survives a power failure. Otherwise, it only survives a crash of the process.
    """
    temporary = target.with_name(f".{secrets.token_hex(8)}{WRITING}")
    created = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        os.close(created)
        yield temporary
        if durable:
            sync(temporary)
        os.replace(temporary, target)
        if durable:
            sync(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_file(target: Path, content: bytes | str, *, durable: bool = True) -> None:
    """Write a file atomically, replacing any existing file."""
    with replacing(target, durable=durable) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(target: Path, content: object, *, durable: bool = True, indent: int | None = None) -> None:
    """Write a JSON file atomically, creating its folder if necessary."""
    target.parent.mkdir(parents=True, exist_ok=True)
    write_file(target, json_text(content, indent) + "\n", durable=durable)


def json_text(content: object, indent: int | None = None) -> str:
    """Return JSON that can be encoded as UTF-8, even if it contains file names that are not valid UTF-8."""
    text = json.dumps(content, indent=indent, ensure_ascii=False)
    if any("\ud800" <= character <= "\udfff" for character in text):  # surrogates represent bytes that are not UTF-8
        return json.dumps(content, indent=indent)
    return text


def sync(path: Path) -> None:
    """Flush a file's content, or the names in a folder, to disk.

    A folder's path may be a symbolic link, because the user chose it. A file's path may not.
    """
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECTORY if path.is_dir() else os.O_NOFOLLOW))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_append(path: Path, *, truncate: bool = False) -> int:
    """Open a file for appending, creating it if necessary; raise UserError if it is a symbolic link or a pipe."""
    mode = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        opened = os.open(path, mode | (os.O_TRUNC if truncate else 0), 0o644)
    except OSError as error:
        if error.errno == errno.ENXIO:  # error for a pipe that no process reads
            raise _neither(path) from None
        if error.errno != errno.ELOOP:
            raise
        raise UserError(f"{path}: is a symbolic link, which is not followed; remove it") from None
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise _neither(path)
    return opened


def check_own_files(folder: Path) -> None:
    """Raise UserError if a folder or its subfolders contain a pipe, a device or a link that points outside."""
    inside = os.path.realpath(folder)
    for parent, folders, files in os.walk(folder):
        for path in (Path(parent, name) for name in (*folders, *files)):
            with suppress(FileNotFoundError):  # the file has been removed in the meantime
                mode = path.lstat().st_mode
                if stat.S_ISLNK(mode):
                    if not Path(os.path.realpath(path)).is_relative_to(inside):
                        raise UserError(
                            f"{path}: is a symbolic link that points outside the run folder; remove the link"
                        )
                elif not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                    raise _neither(path)


def _neither(path: Path) -> UserError:
    return UserError(f"{path}: is neither a file nor a folder; remove it")


def remove_leftovers(folder: Path, older_than_seconds: float = 0.0) -> None:
    """Remove temporary files that a killed process left in a folder.

    If other commands may be writing to the folder, pass a minimum age, because newer files may still be in use.
    """
    for leftover in folder.glob(f".*{WRITING}"):
        with suppress(FileNotFoundError):
            if time.time() - leftover.lstat().st_mtime >= older_than_seconds:
                leftover.unlink()


def user_path(text: str | Path) -> Path:
    """Return a path with ~ replaced by the home folder; raise UserError if no file could have this path."""
    path = Path(os.path.expanduser(text))  # unlike Path.expanduser, keeps a ~name that is no user's name
    first = path.parts[0] if path.parts else ""
    if first.startswith("~") and not os.path.lexists(first):
        raise UserError(f"{text}: {first} is not the home folder of a known user; give the whole path")
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # ValueError: a null character, or text that is not a file name
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(describe_limit(error) or f"{str(text)[:200]!r}: {reason}; use a different path") from None
    return path


def check_new_file(out: str, suffixes: tuple[str, ...], *, overwrite: bool, flag: str = "--out") -> Path:
    """Return the path given by a flag; raise UserError for a wrong suffix or an existing file."""
    target = user_path(out)
    if target.suffix not in suffixes:
        raise UserError(f"{flag} {out}: expected a file name ending in {' or '.join(suffixes)}")
    check_creatable(target, flag)
    if os.path.lexists(target) and not overwrite:
        raise UserError(f"{flag} {out}: the file exists; use --overwrite to replace it")
    return target


def check_creatable(target: Path, flag: str) -> None:
    """Raise UserError if no file can be written to a path; called before the work that ends with this file."""
    if target.exists() and not target.is_file():
        raise UserError(f"{flag} {target}: is {'a folder' if target.is_dir() else 'not a file'}; give a file name")
    folder = next(parent for parent in target.absolute().parents if os.path.lexists(parent))
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"{flag} {target}: {error.strerror or error}") from None


@contextmanager
def new_file(target: Path, flag: str = "--out") -> Iterator[Path]:
    """Yield a temporary file that becomes `target`; report file system errors as a UserError about a flag."""
    check_creatable(target, flag)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary:
            yield temporary
    except OSError as error:
        raise UserError(f"{flag} {target}: {error.strerror or error}") from None
