"""Summarise and compress a trace in a separate process, because a large trace takes minutes and gigabytes of memory.

In the training process, this would stop the training loop, and the launcher could mistake the pause for a hang.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from paceline.training import trace
from paceline.training.trace import TraceTimes


class TraceError(Exception):
    """Raised if a trace cannot be summarised or compressed."""


def summarise_trace(path: Path) -> TraceTimes:
    """Return the times in a trace file, and replace the file with a compressed one; wait until this is done."""
    # The module does not import torch. With -P, modules in the current folder do not shadow others.
    command = [sys.executable, "-P", "-m", trace.__name__, str(path), str(os.getpid())]
    finished = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if finished.returncode:
        last = (finished.stderr.splitlines() or [f"exit code {finished.returncode}"])[-1]
        raise TraceError(last)
    return TraceTimes.from_json(json.loads(finished.stdout))
