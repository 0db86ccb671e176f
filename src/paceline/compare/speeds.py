"""Measures the speed of runs that were trained side by side, in one short run of each kind while nothing else runs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from paceline.compare.cells import PlannedRun, made_from
from paceline.compare.finished import without_speed
from paceline.compare.options import Options
from paceline.compare.record import CellRecord
from paceline.config.resolve import Config
from paceline.core.activity import activity
from paceline.core.errors import UserError
from paceline.launch.child import Start, failure_reason, run_paceline, to_arguments
from paceline.report.run import Run
from paceline.report.run_reader import read_run
from paceline.runs.stages import stages_of

SECONDS = 5.0  # approximate duration of the measured training
MIN_STEPS = 32
LOG_INTERVALS = 8
KEPT_TIMES = ("data", "step", "between_steps")  # not the others: evaluation and saving take up too much of a short run


def measure_speeds(
    planned: Sequence[PlannedRun], options: Options, folder: Path, console: Console, start: Start
) -> list[str]:
    """Replace the speeds of runs that were trained side by side; return descriptions of what could not be measured."""
    kinds: dict[str, list[PlannedRun]] = {}
    for one in planned:
        if one.cell.run is not None and one.cell.run.side_by_side:
            kinds.setdefault(one.cell.kind, []).append(one)
    missing = []
    for kind, members in kinds.items():
        words = f"speed of {kind}"
        try:
            alone = _measure(words, members[0], options, folder / "speeds" / kind, console, start)
        except (OSError, ValueError, LookupError, TypeError) as error:
            reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            missing.append(f"{words}: {reason}")
            console.print(f"{words}: not measured: {reason}", soft_wrap=True)
            alone = None
        for one in members:
            assert one.cell.run is not None
            one.cell.run = _with_speed(one.cell.run, alone)
    return missing


def _measure(words: str, one: PlannedRun, options: Options, out: Path, console: Console, start: Start) -> Run:
    """Return a short run with the same settings, trained while nothing else runs; raise UserError if it fails."""
    assert one.config is not None and one.cell.run is not None
    last = stages_of(one.config)[-1]
    images, per_log = _length(one.cell.run)
    flags = {**one.flags, "images": images, "out": str(out)}
    flags |= {"init_from": last.run.init_from} if last.run.init_from else {}
    stage = [f"stage={last.recipe.stage}"] if last.recipe != one.config.recipe else []
    intervals = ["evaluate_every=never", "sample_every=never", "save_every=100%", f"log_every={per_log} images"]
    assignments = [*options.assignments, *stage, *intervals]
    made = _made_from(last, images)
    record = CellRecord.read(out)
    if record is None or record.made_from != made:
        shutil.rmtree(out, ignore_errors=True)
        CellRecord(made, finished=False).write(out)
    elif record.finished:
        return read_run(str(out))
    log = out.parent.parent / "logs" / f"speed-{out.name}.txt"
    activity(f"measuring: {words}")
    arguments = ["train", one.recipe, *to_arguments(flags, options.config_file, assignments)]
    code = run_paceline(arguments, log, start)
    if code:
        raise UserError(failure_reason(log))
    run = read_run(str(out))
    if run.speed is None:
        raise UserError("the run has no log interval to measure")
    CellRecord(made, finished=True).write(out)
    console.print(f"{words}: {run.speed.images_per_second:,.0f} images/s", soft_wrap=True)
    return run


def _length(run: Run) -> tuple[int, int]:
    """Return the number of images for a measurement of about SECONDS, and the number of images per log line."""
    wanted = min(SECONDS * run.speed.images_per_second, run.images) if run.speed else 0.0
    steps = max(MIN_STEPS, round(wanted / run.batch))
    return steps * run.batch, max(1, steps // LOG_INTERVALS) * run.batch


def _made_from(config: Config, images: int) -> dict[str, str]:
    return made_from(config.with_run(images=images))


def _with_speed(run: Run, alone: Run | None) -> Run:
    """Return a run with the speed of a run that was trained alone, or without a speed."""
    if alone is None:
        return without_speed(run)
    times = {name: value for name, value in alone.seconds_per_epoch.items() if name in KEPT_TIMES}
    return replace(
        run,
        speed=alone.speed,
        speed_run=alone.folder,
        seconds_per_epoch=times,
        gpu=alone.gpu,
        load_average=alone.load_average,
    )
