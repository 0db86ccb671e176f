"""User errors. Each message is one line: the wrong flag, file or value, the problem, and what to do."""

import errno
import inspect
import os
import traceback
from collections.abc import Callable, Iterable
from difflib import SequenceMatcher, get_close_matches

CPU_ALLOCATOR = "DefaultCPUAllocator"  # part of the message if torch cannot allocate host memory
LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)  # of open files, memory, processes and threads
LONGEST_SHOWN = 100  # characters of a path that is too long
# Error codes for a full disk, an exceeded quota, a file above the size limit, and a failed disk or file server.
DISK_FAILED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE)
NOT_FOUND = "no such file or folder"
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)  # errno values for a missing permission or a read-only disk


class UserError(ValueError):
    """An error that the user can fix, such as an unknown setting.

    A command prints the message on one line and exits with code 2, without a traceback. Plugins raise it for bad input.

    Examples:
        >>> try:
        ...     paceline.train("clasification")
        ... except paceline.UserError as error:
        ...     print(error)
        unknown recipe 'clasification'; did you mean 'classification'?
    """


class UnknownSetting(UserError):
    """The run does not have a setting. `origin` is the place where it was set, for example `--config FILE`."""

    def __init__(self, message: str, origin: str = "") -> None:
        super().__init__(message)
        self.origin = origin


class NoClasses(UserError):
    """The data has no classes, or too few for the recipe. The data source's notes are appended to the message."""


def too_few_classes(setting: str, num_classes: int) -> NoClasses:
    """Return the error for a setting that is on, but needs at least two classes."""
    number = "only one class" if num_classes else "no classes"
    return NoClasses(f"{setting}=on: the data has {number}; use data with at least two, or {setting}=off")


def install_extra(name: str) -> str:
    """Return the pip command that installs one of Paceline's extras."""
    return f"pip install 'paceline[{name}]'"


def describe_error(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def missing(package: str, extra: str) -> str:
    """Return the message for a missing package; if the package belongs to an extra, include the install command."""
    return f"package {package} is not installed" + (f": {install_extra(extra)}" if extra else "")


def check_parameters(shown: str, function: Callable[..., object], *arguments: object) -> None:
    """Raise UserError if a function in a plugin cannot be called with these arguments; `shown` is how to declare it."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise UserError(f"{shown}: has different parameters ({error}); declare it like this") from None


def closest(name: str, names: Iterable[str]) -> str:
    """Return the name that the user probably misspelled or shortened; "" if none is close enough to suggest."""
    for close in get_close_matches(name, names, n=3, cutoff=0.6):
        is_alike = SequenceMatcher(None, close, name).ratio() >= 0.75
        if is_alike or close.startswith(name) or sorted(close) == sorted(name):  # swapped letters
            return close
    return ""


def unknown(kind: str, name: str, names: Iterable[str], *, meant: str | None = None, listed_by: str = "") -> UserError:
    """Return the error for an unknown name; the message suggests `meant` if given, else the closest name.

    If no name is close, the message lists all names or, if `listed_by` is given, the command that lists them.
    """
    names = sorted(names)
    close = meant if meant in names else closest(name, names)
    listed = f"{listed_by} lists every {kind}" if listed_by else f"choose from: {', '.join(names)}"
    hint = f"did you mean {close!r}?" if close else listed if names else "there are none"
    return UserError(f"unknown {kind} {name!r}; {hint}")


def describe_limit(error: BaseException) -> str:
    """Return the line for an error caused by a limit of the system, such as its memory; empty for any other error."""
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, OSError) and number == errno.ENAMETOOLONG:
        return f"{str(error.filename)[:LONGEST_SHOWN]}…: the path or one of its names is too long: use a shorter one"
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    no_thread = isinstance(error, RuntimeError) and frames and frames[-1].f_globals.get("__name__") == "threading"
    is_limit = number in LIMITS or isinstance(error, MemoryError) or no_thread
    is_limit = is_limit or any(text in str(error) for text in (os.strerror(errno.EMFILE), CPU_ALLOCATOR))  # from torch
    remedy = "raise the limit (`ulimit -n` files, `-u` processes, `-v` memory), or use fewer processes or less memory"
    if isinstance(error, ImportError) and ".so" in str(error):
        return f"{describe_error(error)}: repair the installation, or {remedy}"
    if isinstance(error, OSError) and not is_limit:
        place = error.filename2 or error.filename  # of a file that is renamed, the new path
        if number in (*DISK_FAILED, *NOT_WRITABLE):
            remedy = "check the permissions, the free space and the quota of the disk"
            return f"{f'{place}: ' if place else ''}{error.strerror}: {remedy}"
        if place and error.strerror:
            return f"{place}: {error.strerror}: check what is at this path"
    return f"{describe_error(error)}: {remedy}" if is_limit else ""


def place_outside(error: BaseException, paths: tuple[str, ...]) -> str:
    """Return ` (FILE:LINE)`: the innermost line of code outside `paths`, which are files or folders; may be empty."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(paths)]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
