"""A run in one process does not import modules that take seconds and that it does not use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SLOW_MODULES = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "lightning", "matplotlib")
CODE = """
import json, sys
from paceline.cli.app import run
code = run(sys.argv[2:])
print(json.dumps([code, [name for name in sys.argv[1].split(",") if name in sys.modules]]))
"""


def test_training_evaluating_and_saving_import_neither_the_compiler_nor_dtensor(tmp_path: Path, tiny: str) -> None:
    words = ("train", tiny, "--accelerator", "cpu", "--images", "160", "--out", "run", "--loggers", "")
    command = [sys.executable, "-c", CODE, ",".join(SLOW_MODULES), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env={**os.environ})
    assert json.loads(done.stdout.splitlines()[-1]) == [0, []], done.stderr
    assert "test/top1" in done.stdout
