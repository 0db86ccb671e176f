"""Lines that are printed once for a command, whatever number of processes it starts."""

from __future__ import annotations

import os
from typing import TextIO

ANNOUNCED = "PACELINE_ANNOUNCED"  # what this process, or one that started it, has announced


def announce(subject: str, line: str, file: TextIO) -> None:
    """Print a line on a subject unless this process or one of its ancestors has done so."""
    before = os.environ.get(ANNOUNCED, "").split(os.pathsep)
    if subject not in before:
        print(line, file=file, flush=True)
        os.environ[ANNOUNCED] = os.pathsep.join([*filter(None, before), subject])
