"""The format version of the files that a run writes: config, checkpoints, mirror and weights files."""

from __future__ import annotations

from paceline.core.errors import UserError

RUN_FORMAT = 2
FORMAT = "format"  # key of the format version in each file
FIRST_FORMAT = 1  # format version of files without this key


def check_format(found: object, where: str, remedy: str = "train it again") -> None:
    """Raise UserError unless `found` is the format version that Paceline reads; the message starts with `where`."""
    version = FIRST_FORMAT if found is None else found
    if str(version) != str(RUN_FORMAT):
        raise UserError(
            f"{where}: run format {version}, but this version of Paceline reads format {RUN_FORMAT}: "
            f"{remedy}, or use the version that wrote it"
        )
