"""A rank that is slower, is stopped or skips a collective is named correctly, every time."""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from running import start_fork, start_ranks

pytestmark = [pytest.mark.torture, pytest.mark.timeout(600)]

FAULTY = str(Path(__file__).parents[1] / "faulty.py")
NUM_CASES = 20  # per fault


class FaultCase(NamedTuple):
    """A run in which one rank has a fault."""

    fault: str  # "slow", "stop" or "skip"
    number: int  # case number, also the run's seed
    size: int  # number of ranks
    rank: int  # the rank that has the fault
    at: int  # the step of the fault

    def __str__(self) -> str:
        return f"{self.fault}-{self.number}-rank-{self.rank}-of-{self.size}-at-{self.at}"


def fault_cases() -> list[FaultCase]:
    """Return the cases: with two ranks, and some with three."""
    chance = random.Random(17)
    cases = []
    for fault in ("slow", "stop", "skip"):
        for number in range(NUM_CASES):
            size = 3 if number % 5 == 4 else 2
            cases.append(FaultCase(fault, number, size, chance.randrange(size), chance.randrange(3, 30)))
    return cases


def command_of(case: FaultCase) -> tuple[str, ...]:
    # Long log intervals, because other programs on the machine delay some steps.
    settings = (
        "log_every=12 steps",
        f"fault={case.fault}",
        f"faulty_rank={case.rank}",
        f"at={case.at}",
        f"seed={case.number}",
    )
    # Each rank gets the same number of samples, so that healthy ranks have the same work.
    words = ("--batch-size", f"{8 * case.size}", "--images", f"{8 * case.size * 84}", "--timeout", "4", "--out", "run")
    assignments = [word for one in settings for word in ("--set", one)]
    return ("train", FAULTY, *assignments, *words, "--accelerator", "cpu", "--strategy", "ddp")


def named_ranks(folder: Path, case: FaultCase) -> set[int]:
    """Run a case and return the ranks that its output names."""
    if case.fault == "skip":  # libtorch may abort a process, so only a launcher can compare the records
        running = start_fork(folder, *command_of(case), "--devices", str(case.size))
        running.wait(300)
        return {int(found) for found in re.findall(r"rank (\d+) did not arrive", running.stderr)}
    ranks = start_ranks(folder, case.size, *command_of(case))
    if case.fault == "slow":
        for running in ranks:
            running.wait(300)
        return {int(found) for found in re.findall(r"straggler: rank (\d+) needs", ranks[0].stdout)}
    healthy = [running for rank, running in enumerate(ranks) if rank != case.rank]
    for running in healthy:
        running.wait(300)
    ranks[case.rank].kill(signal.SIGKILL)
    text = "".join(running.stderr for running in healthy)
    logs = "".join(path.read_text() for path in (folder / "run" / "logs").glob("rank-*.txt"))
    return {int(found) for found in re.findall(r"rank (\d+) (?:did not arrive|ended)", text + logs)}


@pytest.mark.parametrize("case", fault_cases(), ids=str)
def test_the_faulty_rank_is_named(tmp_path: Path, case: FaultCase, tally: Callable[[str], Any]) -> None:
    found = tally(f"a rank with a fault is named: {case.fault}")
    named = named_ranks(tmp_path, case)
    found.add(str(case), "" if named == {case.rank} else f"named {sorted(named)}")
    found.check()
