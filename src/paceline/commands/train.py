"""`paceline train`: train a recipe and write a run folder."""

from __future__ import annotations

import math
import os
import shlex
import signal
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline.config.resolve import Config
from paceline.core.errors import UserError
from paceline.core.output import outlive_stdout
from paceline.core.registry import is_installed, is_path
from paceline.core.text import print_line, printable
from paceline.core.watch import Watch, dump_stacks_now, is_watched, prepare
from paceline.data.worker_pool import reporting_dead_workers
from paceline.inference.trained import Use, uses_of
from paceline.launch.mailbox import report_user_error, unregister_worker
from paceline.launch.rendezvous import Rendezvous
from paceline.launch.tasks import Task, run_in_processes
from paceline.parallel.group import place_from, place_of
from paceline.parallel.strategy import strategy_class
from paceline.parallel.world import World, join
from paceline.runs.finished_run import stages_of
from paceline.runs.folder import RunFolder
from paceline.runs.logger import check_loggers
from paceline.runs.metrics import read_metrics
from paceline.runs.terminal import LOGS
from paceline.training.build import Parts, assemble
from paceline.training.compile import recorded_choice
from paceline.training.resume import check_settings
from paceline.training.session import open_session
from paceline.training.stop import INTERRUPTED, MIRROR_INCOMPLETE, StopRequest

ARGUMENTS: dict[Use, tuple[str, ...]] = {
    "predict": ("path/to/images",),
    "apply": ("path/to/images", "--out", "results"),
    "sample": (),
}


def print_next_steps(config: Config, run: Path) -> None:
    """Print up to three commands, one per line: use the model, evaluate it, and watch the runs in a browser."""
    trust = ["--trust"] if is_path(config.recipe_name) or is_path(config.run.data) else []
    uses = list(uses_of(config.recipe_class))[:1]
    commands = [[use, str(run), *ARGUMENTS[use], *trust] for use in uses]
    commands += [["evaluate", str(run), *trust]] if config.recipe_class.evaluation.evaluator else []
    commands += [["board", str(run.parent)]] if is_installed("uvicorn") else []
    if commands:  # printed without wrapping, so that they can be pasted
        lines = (f"  {printable(shlex.join(['paceline', *words]))}" for words in commands)
        print("\n".join(["next:", *lines]), flush=True)


LAUNCHER_SECONDS = 10.0  # how much longer than its launcher a worker waits for progress
PRINT_SECONDS = 1.0


@dataclass(frozen=True)
class TrainResult:
    """The outcome of a run, as returned by `paceline.train`.

    Attributes:
        folder: The run folder. For a run with several stages, the folder of the last stage that has started.
        images: The number of images seen at the last checkpoint.
        exit_code: The exit code of `paceline train`: 0 if the run finished, 74 if it finished but its mirror is not
            complete, 75 or 130 if a signal stopped it and it saved a checkpoint, any other number if a worker process
            died.
        metrics: The last value of each metric, by `group/name`.

    Examples:
        >>> result = paceline.train("classification", preset="quick", epochs=1, out="runs/first")
        >>> result
        TrainResult(folder='runs/first', images=1344, test/loss=..., test/top1=..., test/top5=...)
        >>> result.ok
        True
        >>> accuracy = result.metrics["test/top1"]
    """

    folder: Path
    images: int
    exit_code: int
    metrics: dict[str, float]

    @property
    def ok(self) -> bool:
        """Whether the run finished, and its mirror, if any, is complete."""
        return self.exit_code == 0

    def __repr__(self) -> str:
        parts = [f"folder={str(self.folder)!r}", f"images={self.images}"]
        parts += [f"exit_code={self.exit_code}"] if self.exit_code else []
        parts += [f"{name}={value:.4g}" for name, value in self._evaluated().items()]
        return f"TrainResult({', '.join(parts)})"

    def _evaluated(self) -> dict[str, float]:
        """Return the metrics for the test split, or for the validation or training split if there is no test split."""
        for split in ("test", "validation", "train"):
            found = {name: value for name, value in self.metrics.items() if name.startswith(f"{split}/")}
            if found:
                return {
                    name: value for name, value in found.items() if not name.endswith(("/count", "/checkpoint_images"))
                }
        return {}


def train_and_advise(config: Config) -> int:
    """Train, then print the commands that make sense next; return the exit code."""
    config = config.with_run(out=config.run.out or default_folder(config))
    code = train(config)
    place = place_from(os.environ)
    if code == 0 and (place is None or place.rank == 0):
        print_next_steps(config, _started_folder(config).path)
    return code


def train(config: Config, *, may_exit: bool = True) -> int:
    """Train a recipe in as many processes as the settings require; return the exit code.

    `may_exit` is False in a user's own program: a run that hangs then raises UserError instead of ending the process.
    """
    check_loggers(config.run.loggers)
    RunFolder(Path(config.run.out))  # raises an error for an invalid name before any process starts
    several = strategy_class(config).needs_processes and config.run.devices > 1
    elastic = config.run.max_restarts or config.run.nnodes != "1" or config.run.rdzv
    if (several or elastic) and place_of(config.run) is None:
        rendezvous = Rendezvous.of(config.run)
        began = time.time()
        reasons: list[str] = []
        try:
            code = run_in_processes(
                Task.of(train_here), config.with_run(nnodes="1", rdzv=""), rendezvous, reasons.append
            )
        except UserError as error:
            _started_folder(config).end_for_others("failed", str(error), began)
            raise
        if code == INTERRUPTED:
            _started_folder(config).end_for_others("stopped", "a second Ctrl-C stopped the run immediately", began)
        elif code:
            reason = reasons[0] if reasons else f"a worker exited with code {code}"
            _started_folder(config).end_for_others("failed", reason, began)
        return code
    return train_here(config, may_exit)


def _started_folder(config: Config) -> RunFolder:
    """Return the run folder; if there are several stages, the folder of the last stage that started."""
    return RunFolder(Path(stages_of(config)[0].run.out))


def train_and_report(config: Config) -> TrainResult:
    """Train like `paceline train`, and return the run folder, the metrics and the exit code."""
    config = config.with_run(out=config.run.out or default_folder(config))
    code = train(config, may_exit=False)
    folder = _started_folder(config)
    lines = read_metrics(folder.path)
    last = {name: value for line in lines for name, value in line.items() if "/" in name}
    metrics = {name: math.nan if value is None else value for name, value in last.items()}
    return TrainResult(folder.path, max(folder.checkpoints.all(), default=0), code, metrics)


def default_folder(config: Config) -> str:
    """Return runs/RECIPE-DATA-SEED; for a user's own file, the file name without its extension is used."""
    recipe, data = Path(config.recipe_name).stem, Path(config.run.data).stem
    return f"runs/{recipe}-{data}-{config.run.seed}"


def train_here(config: Config, may_exit: bool = True) -> int:
    """Train all stages in this process. The process group is joined once, before the first stage."""
    outlive_stdout()
    place = place_from(os.environ)
    if place and (config.run.strategy == "auto" or strategy_class(config).needs_processes):
        config = config.with_run(devices=place.size)  # total number of devices on all hosts
    world = join(config.run, distributed=strategy_class(config).needs_processes)
    code = 0
    try:
        with world.reporting(), reporting_dead_workers():
            stages = stages_of(config, world)
            for stage in stages:
                stage.recipe_class.check(stage.recipe)
            for stage in stages:
                prepare()
                ended = _train_stage(stage, world, may_exit)
                code = ended or code
                if ended not in (0, MIRROR_INCOMPLETE):
                    break
        world.leave()
    finally:
        world.abandon()
    return code


def _train_stage(config: Config, world: World, may_exit: bool) -> int:
    """Resume, train and evaluate one stage, or a run without stages, in this process."""
    stop = StopRequest(announces=world.is_first)
    folder = RunFolder(Path(config.run.out))
    # A launcher watches its workers after their start-up, and so must be faster than they are.
    timeout = config.run.timeout + LAUNCHER_SECONDS * is_watched()
    end = partial(_end_silent_run, config, folder, world, stop, may_exit)
    watch = Watch(lambda: min(timeout, stop.patience()), end, stop.has_arrived)
    with watch, open_session(_assemble(config, folder, world), folder) as session:
        snapshot = session.resume()
        prepare()  # a download of the run from its mirror has beaten, but start-up continues
        if world.peers:
            world.peers.before_exit = partial(session.folder.end, "failed")
        with stop.listening():
            loop, writer = session.train(snapshot, stop)
            if not loop.stopped:
                session.evaluate(loop, writer)
            return session.close(loop, writer)


def _assemble(config: Config, folder: RunFolder, world: World) -> Parts:
    if config.run.compile == "auto":
        config = config.with_run(compile=recorded_choice(folder, world, config.run.resume_from) or "auto")
    return assemble(config, world, partial(check_settings, folder, world))


def _end_silent_run(
    config: Config, folder: RunFolder, world: World, stop: StopRequest, may_exit: bool, silent: float
) -> None:
    """End a run whose main thread does not react, e.g. because a loader process or a disk hangs.

    The process ends even if a disk is unavailable. If it may not exit, raise UserError in the main thread.
    """
    if stop.has_arrived():
        has_saved = bool(folder.checkpoints.all()) or stop.signal == signal.SIGINT
        state, code = "stopped", stop.exit_code if has_saved else 128 + stop.signal
        reason = f"stopped by {signal.Signals(stop.signal).name} after {silent:.0f} s without progress"
    else:
        state, code, reason = "failed", 2, f"no progress for {silent:.0f} s (--timeout {config.run.timeout:g})"
        has_stacks = dump_stacks_now(reason)
        if world.peers:
            reason = world.peers.examine(reason)
        reason += f"; stacks: {folder.path / LOGS / f'rank-{world.rank}.txt'}" if has_stacks else ""
    line = f"{reason}; {folder.checkpoints.describe_newest()}"
    if not may_exit:
        stop.fail(line)
        return
    folder.end(state, reason)
    if world.is_first if state == "stopped" else not report_user_error(line):
        # The main thread may be stuck in a print, so wait only a moment.
        printing = threading.Thread(target=print_line, args=[f"paceline: {line}", sys.stderr], daemon=True)
        printing.start()
        printing.join(PRINT_SECONDS)
    os._exit(unregister_worker(code))
