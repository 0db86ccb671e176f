"""Mistakes a person can mend: one line that names the flag, the file or the value and says what to do."""

import errno
from collections.abc import Iterable
from difflib import get_close_matches

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what a disk says that is full, as OSError has it


class UserError(ValueError):
    """Ends a command with its one line and exit code 2; never with a traceback."""


def install_extra(name: str) -> str:
    """Return the command that installs what an optional part needs."""
    return f"pip install 'paceline[{name}]'"


def unknown(kind: str, name: str, names: Iterable[str], *, meant: str | None = None, listed_by: str = "") -> UserError:
    """The error for a name that is not on a list, with the one that is `meant`, else the closest one.

    Where none is close it has the whole list, or for a long one the command that it is `listed_by`.
    """
    names = sorted(names)
    close = [meant] if meant in names else get_close_matches(name, names, n=1, cutoff=0.5)
    listed = f"{listed_by} lists them" if listed_by else f"there are: {', '.join(names)}"
    hint = f"did you mean {close[0]!r}?" if close else listed if names else "there are none"
    return UserError(f"unknown {kind} {name!r}; {hint}")
