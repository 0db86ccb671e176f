"""A file that a command writes where a person said: whole or not at all, and never over another unasked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.core.errors import UserError


def check_new(out: str, suffixes: tuple[str, ...], *, overwrite: bool) -> Path:
    """The path that `--out` means; refuses other suffixes, and what is there already."""
    target = Path(out).expanduser()
    if target.suffix not in suffixes:
        raise UserError(f"--out {out}: expected a name that ends in {' or '.join(suffixes)}")
    if target.is_dir():
        raise UserError(f"--out {out}: is a folder; name a file")
    if os.path.lexists(target) and not overwrite:
        raise UserError(f"--out {out}: is there already; --overwrite replaces it")
    return target


@contextmanager
def written_beside(target: Path) -> Iterator[Path]:
    """A path to write to, which becomes the file when nothing went wrong."""
    beside = target.with_name(f"{target.name}.writing")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside.touch()  # what cannot be written is found out before the work
        yield beside
        beside.rename(target)
    except OSError as error:
        raise UserError(f"--out {target}: {error.strerror or error}") from None
    finally:
        beside.unlink(missing_ok=True)
