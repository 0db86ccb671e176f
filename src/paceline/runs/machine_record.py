"""Saved results of `paceline doctor` on this machine, which other commands read."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.core.files import write_json
from paceline.core.small_files import read_json
from paceline.core.user_cache import user_cache
from paceline.runs.provenance import describe_gpus

SELF_TEST, LOADERS = "self-test.json", "loaders.json"
HOW_TO_TEST = "run `paceline doctor --self-test`"


def cache_file(name: str) -> Path:
    """Return the path of a file in Paceline's cache folder."""
    return user_cache() / name


def read_cached(name: str) -> Mapping[str, Any]:
    """Return a saved result; empty if it is missing or damaged."""
    return read_json(cache_file(name))


def store_cached(name: str, content: object) -> str:
    """Save a result; return where, or why it could not be saved."""
    try:
        write_json(cache_file(name), content)
    except OSError as error:
        return f"not saved ({cache_file(name)}: {error.strerror}), so later runs cannot use it"
    return f"saved to {cache_file(name)}"


def identity() -> dict[str, str]:
    """Return the host, GPUs, driver and torch version for which a saved result is valid."""
    gpus = describe_gpus()
    return {
        "host": platform.node(),
        "gpus": gpus.get("gpus", ""),
        "driver": gpus.get("driver", ""),
        "torch": str(torch.__version__),
    }


@dataclass(frozen=True)
class _GraphTest:
    """The self-test's result for a training step that was captured as a CUDA graph."""

    passed: bool
    result: str  # description of the failure, or of the values that were compared
    processes: int


@dataclass(frozen=True)
class _SelfTest:
    """The part of a self-test's results that concerns CUDA graphs."""

    machine: Mapping[str, str]
    verified: bool
    graph: _GraphTest | None

    @classmethod
    def read(cls) -> _SelfTest | None:
        """Return the saved self-test, or None if it is missing or cannot be read."""
        cached = read_cached(SELF_TEST)
        try:
            graph = cached["graph"]
            tested = _GraphTest(graph["passed"], graph["result"], graph["processes"]) if graph else None
            return cls(cached["machine"], bool(cached["verified"]), tested)
        except (KeyError, TypeError):
            return None


def graph_obstacle(processes: int, hosts: int) -> str:
    """Return why this machine cannot capture a step on several GPUs as a CUDA graph; empty if the self-test passed."""
    if hosts > 1:
        return "CUDA graphs are untested across several hosts"
    test = _SelfTest.read()
    if test is None:
        return f"CUDA graphs are untested on this machine's GPUs; {HOW_TO_TEST}"
    for name, here in identity().items():
        then = test.machine.get(name, "")
        if then != here:
            return f"the self-test is outdated ({name}: {then or 'unknown'}, now {here}); {HOW_TO_TEST}"
    if not test.verified:
        return "this machine's self-test failed"
    if not test.graph:
        return f"this machine's self-test used fewer than two GPUs; {HOW_TO_TEST}"
    if not test.graph.passed:
        return f"in this machine's self-test, {test.graph.result}"
    if processes > test.graph.processes:
        return f"this machine's self-test used fewer GPUs ({test.graph.processes}, not {processes}); {HOW_TO_TEST}"
    return ""
