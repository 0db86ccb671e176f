"""Every comparison in `make demo` runs and writes a report."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from running import run_fork

DEMO = Path(__file__).parents[2] / "examples" / "demo.sh"
LINES = DEMO.read_text().replace("\\\n", "").splitlines()
COMPARISONS = [shlex.split(line)[1:] for line in LINES if line.startswith("paceline ")]
SHORT = ("--images", "64", "--strategies", "single", "--seeds", "0", "--jobs", "1", "--no-verify", "--no-step-ladder")


@pytest.mark.slow
@pytest.mark.parametrize("words", COMPARISONS, ids=lambda words: words[-1])
def test_each_comparison_in_the_demo_writes_a_report(tmp_path: Path, words: list[str]) -> None:
    compared = run_fork(tmp_path, *words, *SHORT)
    assert compared.wait() == 0, compared.stdout + compared.stderr
    assert compared.stdout.rstrip().endswith(f"report: {words[-1]}/report.html")
    assert (tmp_path / words[-1] / "report.html").is_file()
