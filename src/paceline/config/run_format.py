"""The version of what a run leaves on disk: its config, checkpoints and mirror, and weights files."""

from __future__ import annotations

from paceline.core.errors import UserError

RUN_FORMAT = 2
FORMAT = "format"  # the name under which each of these files keeps it
FIRST_FORMAT = 1  # of files that keep none


def check_format(found: object, where: str, remedy: str = "train it again") -> None:
    """Raise UserError unless `found` is the format that this version reads; `where` begins the message."""
    version = FIRST_FORMAT if found is None else found
    if str(version) != str(RUN_FORMAT):
        raise UserError(
            f"{where}: run format {version}, this version reads {RUN_FORMAT}: {remedy}, or use the version that made it"
        )
