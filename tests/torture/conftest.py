"""Count passed and failed cases in the torture tests, and print a table at the end."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROPERTY = "torture"


class Tally:
    """Counts the passed and failed cases in one test."""

    def __init__(self, group: str) -> None:
        self.group, self.passed, self.total = group, 0, 0
        self.faults: list[str] = []

    def add(self, name: str, fault: str) -> None:
        """Count one case, which passed if `fault` is empty."""
        self.total += 1
        if fault:
            self.faults.append(f"{name}: {fault}")
        else:
            self.passed += 1

    def check(self) -> None:
        """Fail the test with a list of all failed cases, if any."""
        assert self.total and not self.faults, f"{self.passed} of {self.total}\n" + "\n".join(self.faults)


@pytest.fixture
def tally(record_property: Callable[[str, object], None]) -> Callable[[str], Tally]:
    """Return a function that creates a counter for a group of cases in the final table."""

    def open_tally(group: str) -> Tally:
        opened = Tally(group)
        record_property(PROPERTY, opened)
        return opened

    return open_tally


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Convert counters to plain values for pytest-xdist; an aborted test counts as a failed case."""
    report = yield
    broke_off = report.when == "call" and report.failed
    report.user_properties = [
        (name, [one.group, one.passed, one.total + (broke_off and not one.faults), one.faults])
        if isinstance(one, Tally)
        else (name, one)
        for name, one in report.user_properties
    ]
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the results table, and write it to the JSON file `$TORTURE_JSON` if that is set."""
    rows: dict[str, list[Any]] = defaultdict(lambda: [0, 0, 0.0, []])
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, value in report.user_properties if report.when == "call" else ():
                if name == PROPERTY:
                    group, passed, total, faults = value
                    row = rows[group]
                    row[0], row[1], row[2] = row[0] + passed, row[1] + total, row[2] + report.duration
                    row[3] += faults
    if not rows:
        return
    terminalreporter.section("torture")
    for group, (passed, total, seconds, _) in sorted(rows.items()):
        terminalreporter.write_line(f"{group:<45} {passed:>6,} of {total:>6,} {seconds:>8.0f} s")
    if os.environ.get("TORTURE_JSON"):
        table = [
            {"group": group, "passed": passed, "total": total, "seconds": round(seconds, 1), "faults": faults}
            for group, (passed, total, seconds, faults) in sorted(rows.items())
        ]
        file = Path(os.environ["TORTURE_JSON"])
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(table, indent=1) + "\n")
