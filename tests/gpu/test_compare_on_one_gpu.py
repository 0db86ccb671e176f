"""`paceline compare` on one GPU labels results from processes that share it, and skips cells that need two GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

TINY = ["compare", "classification", "--preset", "quick", "--set", "width=4", "--epochs", "2", "--no-verify"]


def compared(folder: Path, *words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "paceline", *TINY, *words, "--out", "table"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "table/report.json").read_text())


def test_results_from_two_processes_on_one_gpu_are_labelled_and_not_recommended(tmp_path: Path) -> None:
    report = compared(tmp_path, "--strategies", "single,dp,ddp", "--devices", "2", "--gpus", "0,0")
    assert [cell["state"] for cell in report["cells"]] == ["done"] * 3, report["cells"]
    labels = [group["label"] for group in report["groups"].values()]
    assert labels == ["single", "dp × 2 (on one GPU)", "ddp × 2 (on one GPU)"]
    assert report["recommendation"]["group"] == "classification-single-1-64"
    assert "step-time breakdown for several processes on one GPU" in " ".join(report["not_measured"])


@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="needs exactly one GPU")
def test_a_cell_that_needs_two_gpus_is_skipped_on_a_machine_with_one(tmp_path: Path) -> None:
    report = compared(tmp_path, "--strategies", "single,ddp", "--devices", "2")
    assert [(cell["state"], cell["reason"]) for cell in report["cells"]] == [
        ("done", ""),
        ("not measured", "needs 2 GPUs, but this machine has 1"),
    ]
