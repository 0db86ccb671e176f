"""Trains the runs of a comparison, several at a time if there are enough devices."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from paceline.compare.cells import (
    PlannedRun,
    needs_training,
    read_results,
    record_side_by_side,
    start_record,
    training_arguments,
)
from paceline.compare.options import Options
from paceline.compare.places import Place, Places, threads_prefix
from paceline.compare.progress import Progress
from paceline.launch.child import POLL_SECONDS, Child, Start, Stopped, forwarded_signals, stop_late


class _Job(NamedTuple):
    planned: PlannedRun
    log: Path


class _PlacedChild(Child):
    """A child process and the part of the machine that it uses."""

    def __init__(self, arguments: Sequence[str], log: Path, place: Place, start: Start) -> None:
        super().__init__(arguments, log, place.environment, start)
        self.place = place


def train_cells(
    planned: Sequence[PlannedRun], options: Options, folder: Path, places: Places, console: Console, start: Start
) -> None:
    """Train the runs that have not finished, then read the results of all runs; `start` starts their commands.

    A run that fails does not stop the others. If the user stops the command, every run that is being trained saves a
    checkpoint, and `Stopped` is raised.
    """
    jobs: dict[_PlacedChild, _Job] = {}
    waiting: list[_Job] = []
    with Progress(console, planned) as progress, forwarded_signals(jobs.keys()) as received:
        for one in planned:
            log = folder / "logs" / f"{one.cell.name}.txt"
            if one.config is not None:
                one.cell.command = _repeating_command(one, options)
            if needs_training(one):
                waiting.append(_Job(one, log))
            else:
                read_results(one, log)
                progress.finish(one)
        while waiting or jobs:
            if not received:
                waiting = [job for job in waiting if not _begin(job, jobs, options, places, progress, start)]
                stop_late(jobs, received)
                assert jobs, "no place for any of the runs"
            for child, job in list(jobs.items()):
                code = child.poll()
                if code is None:
                    continue
                del jobs[child]
                places.give_back(child.place)
                if code == 0 or not received:  # a run that the user stopped has not failed
                    read_results(job.planned, job.log, code)
                    progress.finish(job.planned)
            if received and not jobs:
                break
            if jobs:
                progress.show([job.planned for job in jobs.values()])
                time.sleep(POLL_SECONDS)
    if received:
        raise Stopped(received[0])


def _repeating_command(one: PlannedRun, options: Options) -> str:
    """Return the command that trains a run again, in a different folder."""
    assert one.config is not None
    again = one._replace(config=one.config.with_run(out=f"{one.config.run.out}-again"))
    return f"{threads_prefix()}paceline {shlex.join(training_arguments(again, options))}"


def _begin(
    job: _Job, jobs: dict[_PlacedChild, _Job], options: Options, places: Places, progress: Progress, start: Start
) -> bool:
    """Start a run if there is a place for it; return whether it was started."""
    assert job.planned.config is not None
    place = places.take(job.planned.config)
    if place is None:
        return False
    start_record(job.planned)
    if jobs:
        for other in (job, *jobs.values()):
            record_side_by_side(other.planned)
    arguments = [*training_arguments(job.planned, options), *place.arguments]
    progress.begin(job.planned)
    jobs[_PlacedChild(arguments, job.log, place, start)] = job
    return True
