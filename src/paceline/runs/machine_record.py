"""What `paceline doctor` measured on this machine, cached for commands that use or report it."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.core.files import read_json
from paceline.runs.provenance import describe_gpus

SELF_TEST, LOADERS = "self-test.json", "loaders.json"
HOW_TO_TEST = "`paceline doctor --self-test` shows whether it can be"


def cache_file(name: str) -> Path:
    """Return where a result is cached."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "paceline" / name


def read_cached(name: str) -> Mapping[str, Any]:
    """Return a cached result; an empty one where there is none, or a damaged one."""
    return read_json(cache_file(name))


def identity() -> dict[str, str]:
    """Return what a result is valid for: the host, its GPUs, and torch, whose build includes NCCL."""
    gpus = describe_gpus()
    return {
        "host": platform.node(),
        "gpus": gpus.get("gpus", ""),
        "driver": gpus.get("driver", ""),
        "torch": str(torch.__version__),
    }


@dataclass(frozen=True)
class _GraphTest:
    """The outcome of a captured step in a self-test."""

    passed: bool
    result: str  # in words
    processes: int


@dataclass(frozen=True)
class _SelfTest:
    """What a self-test found about captured steps."""

    machine: Mapping[str, str]
    verified: bool
    graph: _GraphTest | None

    @classmethod
    def read(cls) -> _SelfTest | None:
        """Return the cached self-test, None where there is none that can be read."""
        cached = read_cached(SELF_TEST)
        try:
            graph = cached["graph"]
            tested = _GraphTest(graph["passed"], graph["result"], graph["processes"]) if graph else None
            return cls(cached["machine"], bool(cached["verified"]), tested)
        except (KeyError, TypeError):
            return None


def graph_obstacle(processes: int, hosts: int) -> str:
    """Return why a step over several GPUs should not be captured here; empty where the self-test captured one."""
    if hosts > 1:
        return "a captured step was never shown to work over several hosts"
    test = _SelfTest.read()
    if test is None:
        return f"not shown to work over several GPUs on this machine; {HOW_TO_TEST}"
    for name, here in identity().items():
        then = test.machine.get(name, "")
        if then != here:
            return f"the last self-test is of another {name} ({then or 'unknown'}, here {here}); {HOW_TO_TEST}"
    if not test.verified:
        return "this machine's self-test failed"
    if not test.graph:
        return f"this machine's self-test did not have several GPUs to try it on; {HOW_TO_TEST}"
    if not test.graph.passed:
        return f"in this machine's self-test {test.graph.result}"
    if processes > test.graph.processes:
        return f"this machine's self-test had {test.graph.processes} GPUs, not {processes}; {HOW_TO_TEST}"
    return ""
