"""Mistakes a person can mend: one line that names the flag, the file or the value and says what to do."""

import errno
from collections.abc import Iterable
from difflib import get_close_matches

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what a disk says that is full, as OSError has it


class UserError(ValueError):
    """Ends a command with its one line and exit code 2; never with a traceback."""


def unknown(kind: str, name: str, names: Iterable[str]) -> UserError:
    """The error for a name that is not on a list, with the closest one that is."""
    names = sorted(names)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(names)}"
    return UserError(f"unknown {kind} {name!r}; {hint}")
