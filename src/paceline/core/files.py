"""Files: atomic writes, checksums, locks for a single writer, small untrusted files, and the user's cache folder."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import secrets
import socket
import stat
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from hashlib import file_digest, sha256
from io import BufferedReader
from pathlib import Path
from typing import Any

from paceline.core.errors import UserError, describe_limit

WRITING = ".writing"  # suffix of temporary files
SAFETENSORS = ".safetensors"  # suffix of files with tensors, such as weights


_unfinished: set[Path] = set()


@contextmanager
def replacing(target: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield an empty temporary file, which replaces `target` if the block ends without an error.

    If `durable` is true, the new content survives a power failure. Otherwise, it only survives a crash of the process.
    """
    temporary = target.with_name(f".{secrets.token_hex(8)}{WRITING}")
    _unfinished.add(temporary)
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
        yield temporary
        if durable:
            sync(temporary)
        os.replace(temporary, target)
        if durable:
            sync(target.parent)
    finally:
        temporary.unlink(missing_ok=True)
        _unfinished.discard(temporary)


def remove_unfinished() -> None:
    """Remove the temporary files of this process, which is about to exit without unwinding its stack."""
    for temporary in list(_unfinished):
        with suppress(OSError):
            temporary.unlink()


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
        sync_open(descriptor)
    finally:
        os.close(descriptor)


def sync_open(descriptor: int) -> None:
    """Flush an open file or folder to disk, unless its file system, such as some network file systems, cannot do so."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


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


def checksum_of_file(file: Path) -> str:
    """Return the checksum of a file's bytes."""
    with file.open("rb") as opened:
        return file_digest(opened, "sha256").hexdigest()


def checksum_of_content(content: object) -> str:
    """Return the checksum of JSON content, which does not depend on key order."""
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def user_cache() -> Path:
    """Return Paceline's cache folder, usually `~/.cache/paceline`.

    A user without a home folder, such as a numeric user in a container, has a folder in which every write fails. The
    folder for temporary files would not be safe, because other users can write to it.
    """
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "paceline"
    try:
        return Path.home() / ".cache" / "paceline"
    except RuntimeError:
        return Path(os.devnull) / "paceline"


def writable_cache(name: str) -> Path | None:
    """Create a folder inside Paceline's cache folder and return it; None if it cannot be written."""
    try:
        folder = user_cache() / name
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return None
    return folder


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
    return " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__


LOCK = ".lock"  # name of the lock file in the locked folder
MAX_OWNER_BYTES = 300  # a process ID and a host name
READER_SECONDS = 1.0  # how long to wait for readers, which hold a shared lock only briefly


class InUse(Exception):
    """Raised if another process holds the lock. The message is its process ID, and its host if that is another one.

    `is_elsewhere` is true if the process runs on another host. If that host goes down, the shared file system may
    keep the lock for some time.
    """

    def __init__(self, process: str, host: str) -> None:
        self.is_elsewhere = host not in ("", socket.gethostname())
        super().__init__(f"{process} on host {host}" if self.is_elsewhere else process)


class Lock:
    """A lock on a folder, acquired by the constructor and held until `release`."""

    def __init__(self, folder: Path, name: str = LOCK, *, wait_seconds: float = READER_SECONDS) -> None:
        """Acquire the lock; raise InUse if another process still holds it after `wait_seconds`."""
        self.file = folder / name
        until = time.monotonic() + wait_seconds
        while not self._take():
            if time.monotonic() > until:
                raise InUse(*self._owner())
            time.sleep(0.01 if wait_seconds < math.inf else 0.1)

    @property
    def is_in_place(self) -> bool:
        """Whether this process's lock file is still in the folder."""
        try:
            return os.path.samestat(os.fstat(self._opened), os.lstat(self.file))
        except OSError:
            return False

    def release(self, remove: bool = False) -> None:
        """Release the lock, including in child processes that inherited it; with `remove`, delete the lock file."""
        if remove:
            self.file.unlink(missing_ok=True)
        fcntl.flock(self._opened, fcntl.LOCK_UN)
        os.close(self._opened)

    def _take(self) -> bool:
        opened = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        with ExitStack() as unless_taken:
            unless_taken.callback(os.close, opened)
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.path.samestat(os.fstat(opened), os.lstat(self.file)):
                    return False  # the previous owner has removed this file, so a new lock file is used
            except (BlockingIOError, FileNotFoundError):
                return False
            os.ftruncate(opened, 0)
            os.pwrite(opened, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
            unless_taken.pop_all()
        self._opened = opened
        return True

    def _owner(self) -> tuple[str, str]:
        """Return the process and the host in the lock file; "?" and an empty host if they cannot be read."""
        try:
            process, _, host = read_bounded(self.file, MAX_OWNER_BYTES).decode(errors="replace").strip().partition(" ")
        except OSError:
            return "?", ""
        return process or "?", host


def is_locked(descriptor: int) -> bool | None:
    """Return whether a writer has locked an open file, or None if the file system does not support locks.

    The check acquires a shared lock for a moment. A writer that starts at that moment waits until it is released.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def is_folder_locked(folder: Path) -> bool:
    """Return whether a process has locked a folder; False if there is no lock, or its file system does not tell."""
    try:
        opened = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return bool(is_locked(opened))
    finally:
        os.close(opened)
