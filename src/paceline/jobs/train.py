"""`paceline train`: a recipe, data and a strategy become a run."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.config import Config
from paceline.data.source import fingerprint
from paceline.engine.assemble import Parts, assemble, strategy_class
from paceline.engine.checkpoint import Snapshot, load
from paceline.engine.evaluation import Examiner
from paceline.engine.loop import Loop, describe
from paceline.engine.run_folder import RunFolder
from paceline.engine.signals import StopRequest
from paceline.engine.snapshot import load_weights
from paceline.errors import UserError
from paceline.jobs.worker import run_in_processes
from paceline.monitor.console import keep_output
from paceline.monitor.display import Display
from paceline.monitor.made_with import versions_and_hardware
from paceline.monitor.metrics import MetricsWriter, read_metrics
from paceline.parallel.environment import place_from

LOOKED_AT = 16  # samples that tell one data set from another, where reading costs
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    folder: Path
    images: int
    exit_code: int
    metrics: dict[str, float]


def train(config: Config) -> int:
    """Trains a recipe, in as many processes as the settings ask for; gives the exit code."""
    config = config.with_run(out=config.run.out or default_folder(config))
    several = strategy_class(config).distributed and config.run.devices > 1
    if several and place_from(os.environ) is None:
        return run_in_processes("train", config)
    return train_here(config).exit_code


def train_and_report(config: Config) -> Result:
    """Trains like the command does, and gives the folder and the metrics; the exit code is in it."""
    config = config.with_run(out=config.run.out or default_folder(config))
    code = train(config)
    folder = RunFolder(Path(config.run.out))
    lines, _ = read_metrics(folder.path)
    metrics = {name: value for line in lines for name, value in line.items() if "/" in name}
    return Result(folder.path, max(folder.checkpoints.all(), default=0), code, metrics)


def default_folder(config: Config) -> str:
    """runs/RECIPE-DATA-SEED, by the files' own names where they are a person's."""
    recipe, data = Path(config.recipe_name).stem, Path(config.run.data).stem
    return f"runs/{recipe}-{data}-{config.run.seed}"


def train_here(config: Config) -> Result:
    """This process's part of a run."""
    parts = assemble(config)
    folder, stop = RunFolder(Path(config.run.out)), StopRequest()
    with _ending(folder, parts):
        loop = Loop(parts, folder, stop)
        data = _describe_data(parts) if parts.world.is_first else ""
        _claim(folder, parts, data)
        output = keep_output(folder.path, parts.world.rank)
        loop.resume(_find_snapshot(folder, parts, data))
        first = parts.world.is_first
        writer = MetricsWriter(folder.path, loop.images) if first else None
        title = f"{Path(config.recipe_name).stem} → {folder.path}"
        with stop.listening():
            with Display(parts.total_images, loop.images, title, enabled=first) as display:
                loop.attach(writer, display)
                loop.run()
            metrics = {} if loop.stopped else _judge_best(parts, folder, loop, writer)
            if writer:
                writer.close()
            if loop.stopped:
                print(f"stopped at {loop.images:,} images and saved; the same command goes on from here")
            else:
                print(f"run: {folder.path}")
            output.close()  # not after an error: the log is for its traceback too
            parts.world.wait_for_all()  # a launcher ends the rest when one process has ended with an exit code
    return Result(folder.path, loop.images, stop.exit_code if loop.stopped else 0, metrics)


@contextmanager
def _ending(folder: RunFolder, parts: Parts) -> Iterator[None]:
    """Gives back what a run holds at its end; a full disk is said in one line."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            left = folder.checkpoints.what_is_left()
            raise UserError(f"--out {folder.path}: {error.strerror}; {left}") from error
        raise
    else:
        parts.world.leave()
    finally:
        folder.release()
        parts.world.abandon()


def _claim(folder: RunFolder, parts: Parts, data: str) -> None:
    """Makes this run the folder's one writer, if its settings are those that the folder was made with."""
    if parts.world.is_first:
        folder.claim()
        folder.check_settings(parts.config, data)
    parts.world.wait_for_all()


def _describe_data(parts: Parts) -> str:
    """The training samples in short: how many, and a hash of some of them."""
    source = parts.feed.loader.source
    return f"{len(source):,} samples, {fingerprint(source, LOOKED_AT)}"


def _find_snapshot(folder: RunFolder, parts: Parts, data: str) -> Snapshot | None:
    """Says what was chosen and where the run goes on; every rank gets the first one's snapshot."""
    snapshot = None
    for note in parts.notes:
        print(note)
    if parts.world.is_first:
        snapshot = folder.checkpoints.latest(print)
        folder.checkpoints.drop_after(snapshot.images if snapshot else -1)
        folder.keep_settings(parts.config, data, versions_and_hardware())
        if snapshot:
            done = snapshot.images >= parts.total_images
            print(f"{'finished already, at' if done else 'going on from'} {snapshot.images:,} images")
    return parts.world.share(snapshot)  # type: ignore[return-value]


def _judge_best(parts: Parts, folder: RunFolder, loop: Loop, writer: MetricsWriter | None) -> dict[str, float]:
    """The metrics on the test split of the checkpoint that validation chose, or of the last one."""
    if "test" not in parts.loaders or not parts.recipe.judge:
        return {}
    if parts.recipe.judged_on != "validation":  # the numbers that were wanted are there already
        if loop.best:
            print("best: {name} {value:.4g} at {images:,} images".format(**loop.best))
        return {}
    images = loop.best.get("images", loop.images)
    weights = load(folder.checkpoints.path(images)).weights if parts.world.is_first else None
    load_weights(parts.recipe, parts.world.share(weights), averaged=True)  # type: ignore[arg-type]
    examiner = Examiner(parts.recipe, parts.loaders["test"], "test", parts.world, parts.precision, parts.config.run)
    results = examiner.measure()
    metrics = {f"test/{name}": value for name, value in results.items()}
    if writer:
        lines, _ = read_metrics(folder.path)
        if not any(line["images"] == loop.images and line.get("test/of_images") == images for line in lines):
            writer.write(loop.images, metrics | {"test/of_images": float(images)})
        print(f"test, of the checkpoint at {images:,} images: {describe(metrics)}")
    return metrics
