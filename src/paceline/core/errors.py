"""User errors: one line with the flag, the file or the value that is wrong, and what to do."""

import errno
from collections.abc import Iterable
from difflib import get_close_matches

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the errno of an OSError on a full disk


class UserError(ValueError):
    """What the user can fix: ends a command with one line and exit code 2, without a traceback."""


def install_extra(name: str) -> str:
    """Return the command that installs what an optional part needs."""
    return f"pip install 'paceline[{name}]'"


def missing(package: str, extra: str) -> str:
    """Return that a package is not installed and, where one of our extras has it, the command that installs it."""
    return f"package {package} is not installed" + (f": {install_extra(extra)}" if extra else "")


def unknown(kind: str, name: str, names: Iterable[str], *, meant: str | None = None, listed_by: str = "") -> UserError:
    """Return the error for an unknown name; it suggests the name that is `meant`, else the closest one.

    Where none is close it lists all names or, where there are many, the command that lists them (`listed_by`).
    """
    names = sorted(names)
    close = [meant] if meant in names else get_close_matches(name, names, n=1, cutoff=0.5)
    listed = f"{listed_by} lists them" if listed_by else f"there are: {', '.join(names)}"
    hint = f"did you mean {close[0]!r}?" if close else listed if names else "there are none"
    return UserError(f"unknown {kind} {name!r}; {hint}")
