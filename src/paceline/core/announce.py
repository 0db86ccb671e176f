"""Print a line only once per command, even if the command starts several processes."""

from __future__ import annotations

import os
from typing import TextIO

from paceline.core.printable import print_line

ANNOUNCED = "PACELINE_ANNOUNCED"  # environment variable: topics that this process or an ancestor has already announced


def announce(subject: str, line: str, file: TextIO) -> None:
    """Print a line about a topic, unless this process or an ancestor has already printed one."""
    before = os.environ.get(ANNOUNCED, "").split(os.pathsep)
    if subject not in before:
        print_line(line, file)
        os.environ[ANNOUNCED] = os.pathsep.join([*filter(None, before), subject])
