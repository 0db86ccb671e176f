"""The run that an evaluator may read, in tests where no evaluator needs one."""

from __future__ import annotations

from paceline.evaluation.contract import OpenedRun


def no_run(folder: str) -> OpenedRun:
    """Fail: no run may be read."""
    raise AssertionError(f"{folder} is not needed")
