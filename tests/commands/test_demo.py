"""Every comparison in `make demo` runs and writes a report."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import run_fork

from paceline.commands.demo import COMPARISONS, commands

SHORT = ("--images", "64", "--strategies", "single", "--seeds", "0", "--jobs", "1", "--no-verify", "--no-step-ladder")


@pytest.mark.parametrize(("folder", "words"), list(zip(COMPARISONS, commands(), strict=True)), ids=list(COMPARISONS))
def test_each_comparison_in_the_demo_writes_a_report(tmp_path: Path, folder: str, words: list[str]) -> None:
    compared = run_fork(tmp_path, *words, *SHORT)
    assert compared.wait() == 0, compared.stdout + compared.stderr
    assert compared.stdout.rstrip().endswith(f"report: {folder}/report.html")
    assert (tmp_path / folder / "report.html").is_file()
