"""Summarise and compress a trace in a separate process, because a large trace takes minutes and gigabytes of memory.

In the training process, this would stop the training loop, and the launcher could mistake the pause for a hang.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from paceline.training import trace
from paceline.training.trace import TraceTimes


class TraceError(Exception):
    """Raised if a trace cannot be summarised or compressed."""


def summarise_trace(path: Path) -> TraceTimes:
    """Return the times in a trace file, and replace the file with a compressed one; wait until this is done."""
    # The script only imports the standard library. With -I, modules in its folder do not shadow it.
    command = [sys.executable, "-I", trace.__file__, str(path)]
    finished = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if finished.returncode:
        last = (finished.stderr.splitlines() or [f"exit code {finished.returncode}"])[-1]
        raise TraceError(last)
    return TraceTimes.from_json(json.loads(finished.stdout))
