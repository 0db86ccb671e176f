"""What `paceline doctor` showed and measured on this machine, kept for those who decide by it or report it."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from paceline.runs.provenance import describe_gpus

SELF_TEST, LOADERS = "self-test.json", "loaders.json"


def kept_file(name: str) -> Path:
    """Where a result is kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "paceline" / name


def read_kept(name: str) -> dict[str, Any]:
    """A result that was kept; nothing where there is none, or a damaged one."""
    try:
        content = json.loads(kept_file(name).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def identity() -> dict[str, str]:
    """What a result holds for: the host, its GPUs, and torch, whose build brings NCCL along."""
    gpus = describe_gpus()
    return {
        "host": platform.node(),
        "gpus": gpus.get("gpus", ""),
        "driver": gpus.get("driver", ""),
        "torch": str(torch.__version__),
    }


def loader_ceilings(data: str) -> list[dict[str, Any]]:
    """What each loader reached here without training, of a source by its name; the newest measurement of each place."""
    measured = read_kept(LOADERS).get("measured", [])
    return [one for one in measured if one["data"] == data and one["machine"] == identity()]


def doubt_about_graphs(processes: int, hosts: int) -> str:
    """Why a step over several GPUs should not be captured here; empty where the self-test showed that it can be."""
    kept = read_kept(SELF_TEST)
    first = "`paceline doctor --self-test` shows whether it can be"
    if hosts > 1:
        return "a captured step was never shown to work over several hosts"
    if not kept:
        return f"not shown to work over several GPUs on this machine; {first}"
    here = identity()
    for name, value in here.items():
        then = kept.get("machine", {}).get(name, "")
        if then != value:
            return f"the self-test that was kept is of another {name} ({then or 'unknown'}, here {value}); {first}"
    if not kept.get("verified"):
        return "this machine's self-test failed"
    graph = kept.get("graph")
    if not graph:
        return f"this machine's self-test had no several GPUs to try it on; {first}"
    if not graph["passed"]:
        return f"in this machine's self-test {graph['what']}"
    if processes > graph["processes"]:
        return f"this machine's self-test had {graph['processes']} GPUs, not {processes}; {first}"
    return ""
