"""What `paceline doctor` measured on this machine, kept for commands that decide by it or report it."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.core.files import read_json
from paceline.core.types import JsonObject
from paceline.runs.provenance import describe_gpus

SELF_TEST, LOADERS = "self-test.json", "loaders.json"
HOW_TO_TEST = "`paceline doctor --self-test` shows whether it can be"


def kept_file(name: str) -> Path:
    """Return where a result is kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "paceline" / name


def read_kept(name: str) -> Mapping[str, Any]:
    """Return a result that was kept; an empty one where there is none, or a damaged one."""
    return read_json(kept_file(name))


def identity() -> dict[str, str]:
    """Return what a result is valid for: the host, its GPUs, and torch, whose build includes NCCL."""
    gpus = describe_gpus()
    return {
        "host": platform.node(),
        "gpus": gpus.get("gpus", ""),
        "driver": gpus.get("driver", ""),
        "torch": str(torch.__version__),
    }


def loader_ceilings(data: str) -> list[JsonObject]:
    """Return the rate of each loader without training, for a source by name; the newest result of each folder."""
    measured = read_kept(LOADERS).get("measured", [])
    return [one for one in measured if one["data"] == data and one["machine"] == identity()]


@dataclass(frozen=True)
class _GraphTest:
    """How the replay of a captured step went in a self-test."""

    passed: bool
    what: str  # went wrong, or was compared
    processes: int


@dataclass(frozen=True)
class _SelfTest:
    """What a self-test says about captured steps."""

    machine: Mapping[str, str]
    verified: bool
    graph: _GraphTest | None

    @classmethod
    def read(cls) -> _SelfTest | None:
        """Return the self-test that was kept, None where there is none."""
        kept = read_kept(SELF_TEST)
        if not kept:
            return None
        graph = kept.get("graph")
        tested = _GraphTest(graph["passed"], graph["what"], graph["processes"]) if graph else None
        return cls(kept.get("machine", {}), bool(kept.get("verified")), tested)


def doubt_about_graphs(processes: int, hosts: int) -> str:
    """Return why a step over several GPUs should not be captured here; empty where the self-test captured one."""
    if hosts > 1:
        return "a captured step was never shown to work over several hosts"
    test = _SelfTest.read()
    if test is None:
        return f"not shown to work over several GPUs on this machine; {HOW_TO_TEST}"
    for name, here in identity().items():
        then = test.machine.get(name, "")
        if then != here:
            return f"the self-test that was kept is of another {name} ({then or 'unknown'}, here {here}); {HOW_TO_TEST}"
    if not test.verified:
        return "this machine's self-test failed"
    if not test.graph:
        return f"this machine's self-test had no several GPUs to try it on; {HOW_TO_TEST}"
    if not test.graph.passed:
        return f"in this machine's self-test {test.graph.what}"
    if processes > test.graph.processes:
        return f"this machine's self-test had {test.graph.processes} GPUs, not {processes}; {HOW_TO_TEST}"
    return ""
