"""`paceline train`: a recipe, data and a strategy become a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from paceline.config.resolve import Config
from paceline.core.errors import NO_ROOM, UserError
from paceline.core.heartbeat import prepare
from paceline.data.crop import cropped
from paceline.data.fingerprint import describe_samples
from paceline.launch.rendezvous import Rendezvous
from paceline.launch.tasks import Task, run_in_processes
from paceline.parallel.strategy import strategy_class
from paceline.parallel.world import World, join, place_from, place_of
from paceline.runs.checkpoint import Snapshot
from paceline.runs.console import keep_output
from paceline.runs.data_spec_file import write_data_spec
from paceline.runs.display import Display
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricsWriter, read_metrics
from paceline.runs.mirror.session import Mirroring
from paceline.runs.provenance import versions_and_hardware
from paceline.runs.stages import stages_of
from paceline.runs.weights import load_weights
from paceline.training.agreement import checkpoint_at, claim_folder, newest_snapshot
from paceline.training.build import Parts, assemble
from paceline.training.evaluate import SplitEvaluator
from paceline.training.initial_weights import start_from
from paceline.training.loop import Loop, describe
from paceline.training.stop import StopRequest

SECONDS_FOR_LAST_WORDS = 10.0  # that an error waits for the mirror


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
    several = strategy_class(config).needs_processes and config.run.devices > 1
    watched = config.run.max_restarts or config.run.nnodes != "1" or config.run.rdzv
    if (several or watched) and place_of(config.run) is None:
        rendezvous = Rendezvous.of(config.run)
        return run_in_processes(Task.of(train_here), config.with_run(nnodes="1", rdzv=""), rendezvous)
    return train_here(config)


def train_and_report(config: Config) -> Result:
    """Trains like the command does, and gives the folder and the metrics; the exit code is in it."""
    config = config.with_run(out=config.run.out or default_folder(config))
    code = train(config)
    folder = RunFolder(Path(stages_of(config)[0].run.out))  # of several stages, the last one that has begun
    lines = read_metrics(folder.path)
    metrics = {name: value for line in lines for name, value in line.items() if "/" in name}
    return Result(folder.path, max(folder.checkpoints.all(), default=0), code, metrics)


def default_folder(config: Config) -> str:
    """runs/RECIPE-DATA-SEED, by the files' own names where they are a person's."""
    recipe, data = Path(config.recipe_name).stem, Path(config.run.data).stem
    return f"runs/{recipe}-{data}-{config.run.seed}"


def train_here(config: Config) -> int:
    """This process's part of a run, stage by stage where it has stages: the processes meet once for all of them."""
    place = place_from(os.environ)
    if place and (config.run.strategy == "auto" or strategy_class(config).needs_processes):
        config = config.with_run(devices=place.size)  # of all hosts
    world = join(config.run, distributed=strategy_class(config).needs_processes)
    try:
        stages = stages_of(config, world)
        for stage in stages:
            stage.recipe_class.check(stage.recipe)
        for stage in stages:
            prepare()
            result = _train_stage(stage, world)
            if result.exit_code:
                break
        world.leave()
    finally:
        world.abandon()
    return result.exit_code


def _train_stage(config: Config, world: World) -> Result:
    """This process's part of one stage, or of a run without stages."""
    parts = assemble(config, world)
    folder, stop = RunFolder(Path(config.run.out)), StopRequest()
    mirroring = Mirroring(parts.config, folder, parts.world.is_first)
    data = cache(lambda: describe_samples(parts.loaders["train"].source))
    with _ending(folder, parts, mirroring):
        loop, split_evaluator = Loop(parts, folder, stop), _test_examiner(parts)
        claim_folder(folder, parts.world, lambda: mirroring.prepare(data()))
        output = keep_output(folder.path, parts.world.rank)
        snapshot = _find_snapshot(folder, parts)
        settled = _is_settled(folder, parts, snapshot)
        keep_record = cache(lambda: _keep_record(folder, parts, data(), snapshot))
        goes_on = snapshot is not None and snapshot.images < parts.total_images
        if folder.is_mine and not settled and not goes_on:  # how it went on is kept with what it leaves: a checkpoint
            keep_record()
        loop.on_saved = _one_after_the_other(keep_record, mirroring.notice)
        loop.resume(snapshot)
        first = parts.world.is_first
        if folder.is_mine:
            if not settled:
                folder.begin(parts.total_images)
            mirroring.begin()
        writer = MetricsWriter(folder.path, loop.images) if folder.is_mine and not settled else None
        title = f"{Path(config.recipe_name).stem} → {folder.path}"
        with stop.listening():
            with Display(parts.total_images, loop.images, title, enabled=first) as display:
                loop.attach(writer, display)
                if not settled:
                    loop.run()
            metrics = {} if loop.stopped else _judge_best(parts, folder, loop, writer, split_evaluator)
            if writer:
                writer.close()
            folder.end("stopped" if loop.stopped else "finished")
            if loop.saver.num_saves and first:
                print(loop.cost_of_saving())
            if loop.stopped:
                print(f"stopped at {loop.images:,} images and saved; the same command goes on from here")
            else:
                print(f"run: {folder.path}")
            mirroring.finish()
            output.close()  # not after an error: the log is for its traceback too
            parts.world.wait_for_all()  # a launcher ends the rest when one process has ended with an exit code
    return Result(folder.path, loop.images, stop.exit_code if loop.stopped else 0, metrics)


@contextmanager
def _ending(folder: RunFolder, parts: Parts, mirroring: Mirroring) -> Iterator[None]:
    """Gives back what a run holds at its end; a full disk is said in one line."""
    interrupted = False
    try:
        yield
    except KeyboardInterrupt:
        interrupted = True
        folder.end("stopped", "at once, by a second Ctrl-C")
        raise
    except OSError as error:
        folder.end("failed", str(error))
        if error.errno in NO_ROOM:
            left = folder.checkpoints.what_is_left()
            raise UserError(f"--out {folder.path}: {error.strerror}; {left}") from error
        raise
    except BaseException as error:
        folder.end("failed", str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}")
        raise
    finally:
        mirroring.finish(at_most=0.0 if interrupted else SECONDS_FOR_LAST_WORDS)
        folder.release()
        for loader in parts.loaders.values():
            loader.close()


def _find_snapshot(folder: RunFolder, parts: Parts) -> Snapshot | None:
    """Says what was chosen and where the run goes on; every rank gets the newest snapshot that one of them has."""
    for note in parts.notes:
        print(note)
    snapshot = newest_snapshot(folder, parts.world, print)
    if parts.config.run.init_from and not snapshot:
        print(start_from(parts, parts.config.run.init_from))
    if snapshot and parts.world.is_first:
        seen, wanted = snapshot.images, parts.total_images
        if seen > wanted:
            print(f"at {seen:,} images already, past the {wanted:,} that are asked for: nothing is trained or changed")
        else:
            print(f"{'finished already, at' if seen == wanted else 'going on from'} {seen:,} images")
    return snapshot


def _is_settled(folder: RunFolder, parts: Parts, snapshot: Snapshot | None) -> bool:
    """Whether the run saw enough, and has ended wherever it is written, or saw more: nothing of its record changes."""
    if snapshot is None or snapshot.images != parts.total_images:
        return snapshot is not None and snapshot.images > parts.total_images
    return not any(parts.world.collect("unfinished" if folder.is_mine and not folder.has_finished else ""))


def _one_after_the_other(*calls: Callable[[], None]) -> Callable[[], None]:
    def all_of_them() -> None:
        for call in calls:
            call()

    return all_of_them


def _keep_record(folder: RunFolder, parts: Parts, data: str, snapshot: Snapshot | None) -> None:
    """Keeps with what the run is made, and what its recipe was told; of one that saw enough, how it was made stays."""
    images = snapshot.images if snapshot else 0
    if images >= parts.total_images and folder.config_file.exists():
        folder.keep_length(parts.config)
    else:
        folder.keep_settings(parts.config, data, versions_and_hardware() | _means(parts), images)
    write_data_spec(folder.path, cropped(parts.loaders["train"].source.spec, parts.config.run.crop))


def _means(parts: Parts) -> dict[str, str]:
    """What "auto" came to."""
    loader = type(parts.loaders["train"]).__module__.rpartition(".")[2]
    return {"accelerator": parts.world.device.type, "loader": loader}


def _test_examiner(parts: Parts) -> SplitEvaluator | None:
    """Who judges the test split in the end; whether it can be judged shows before training."""
    if "test" not in parts.loaders or not parts.recipe.evaluator or parts.recipe.evaluated_on != "validation":
        return None
    split_evaluator = SplitEvaluator(
        parts.recipe, parts.loaders["test"], "test", parts.world, parts.precision, parts.config.run
    )
    split_evaluator.prepare()
    return split_evaluator


def _judge_best(
    parts: Parts, folder: RunFolder, loop: Loop, writer: MetricsWriter | None, split_evaluator: SplitEvaluator | None
) -> dict[str, float]:
    """The metrics on the test split of the checkpoint that validation chose, or of the last one."""
    if not split_evaluator:  # the numbers that were wanted are there already
        if loop.best:
            print("best: {name} {value:.4g} at {images:,} images".format(**loop.best))
        return {}
    images = loop.best.get("images", loop.images)
    judged = checkpoint_at(folder, parts.world, images)
    if judged is None:  # with a host that was lost
        images = loop.images
        judged = checkpoint_at(folder, parts.world, images)
    assert judged is not None
    load_weights(parts.recipe, judged.weights, ema=True)
    results = split_evaluator.measure()
    metrics = {f"test/{name}": value for name, value in results.items()}
    if writer:
        lines = read_metrics(folder.path)
        if not any(line["images"] == loop.images and line.get("test/of_images") == images for line in lines):
            writer.write(loop.images, metrics | {"test/of_images": float(images)})
    if parts.world.is_first:
        print(f"test, of the checkpoint at {images:,} images: {describe(metrics)}")
    return metrics
