"""One stage of a run in this process: open the folder, resume, train, evaluate, close."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch

from paceline.config.settings import is_never
from paceline.core.errors import DISK_FAILED, NOT_WRITABLE, UserError
from paceline.core.terminal import Counter, activity
from paceline.core.text import duration, epoch, four_digits, print_line
from paceline.data.file_lists import NOT_USED, write_not_used
from paceline.data.fingerprint import describe_samples
from paceline.data.worker_pool import describe_dead_worker
from paceline.parallel.strategy import strategy_name
from paceline.runs.checkpoint import WEIGHTS, Snapshot
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricsWriter, read_metrics
from paceline.runs.mirror import Mirroring
from paceline.runs.provenance import versions_and_hardware
from paceline.runs.record import Choices, Provenance
from paceline.runs.terminal import Display, log_output
from paceline.runs.weights import load_weights, write_data_spec
from paceline.training.build import Parts
from paceline.training.evaluate import EvaluationStopped, SplitEvaluator, final_evaluator, rehearse, training_evaluator
from paceline.training.initial_weights import initialise
from paceline.training.loop import Loop, Outputs
from paceline.training.memory import explain_out_of_memory
from paceline.training.resume import check_fits, checkpoint_at, claim_folder, newest_snapshot, restore_snapshot
from paceline.training.stop import MIRROR_INCOMPLETE, StopRequest

SECONDS_FOR_MIRROR_AFTER_ERROR = 10.0
LOGGER_SECONDS_AFTER_STOP = 5.0


@dataclass(frozen=True)
class Session:
    """A run whose folder this process has opened."""

    parts: Parts
    folder: RunFolder
    mirroring: Mirroring
    output: ExitStack  # copies printed output to logs/ until closed
    on_error: ExitStack  # closes what is still open after an error
    evaluator: SplitEvaluator | None  # for the split evaluated during training
    final_evaluator: SplitEvaluator | None  # for the test split, after training
    describe_data: Callable[[], str]  # returns a fingerprint of the training samples

    def resume(self) -> Snapshot | None:
        """Print the notes, then restore the newest snapshot; if there is none, load initial weights.

        Return the snapshot without its tensors, which are no longer needed.
        """
        parts = self.parts
        listed = write_not_used(self.folder.path / NOT_USED, parts.not_used) if self.folder.is_mine else ()
        for note in (*listed, *parts.notes):
            print_line(note)
        check = partial(check_fits, step=parts.step)
        snapshot = newest_snapshot(self.folder, parts.world, print_line, check, mapped=self._reads_rows)
        if not snapshot and (note := initialise(parts)):
            print_line(note)
        if snapshot:
            restore_snapshot(snapshot, parts.step)
            snapshot = replace(snapshot, weights={}, state={})
        if snapshot and parts.world.is_first:
            seen, total = snapshot.images, parts.total_images
            if seen > total:
                print_line(f"already at {seen:,} images, past the requested {total:,}: nothing left to train")
            else:
                print_line(f"{'already finished at' if seen == total else 'resuming from'} {seen:,} images")
        return snapshot

    def is_settled(self, snapshot: Snapshot | None) -> bool:
        """Return whether the run is finished on every host, or past its end. Its record is then left unchanged."""
        if snapshot is None or snapshot.images != self.parts.total_images:
            return snapshot is not None and snapshot.images > self.parts.total_images
        unfinished = self.folder.is_mine and not self.folder.has_finished
        return not any(self.parts.world.gather_strings("unfinished" if unfinished else ""))

    def train(self, snapshot: Snapshot | None, stop: StopRequest) -> tuple[Loop, MetricsWriter | None]:
        """Train to the end, or until a stop is requested; do nothing if the run has nothing left to train."""
        parts, folder, images = self.parts, self.folder, snapshot.images if snapshot else 0
        settled = self.is_settled(snapshot)
        record = Record(self, snapshot)
        if folder.is_mine and not settled:
            if not 0 < images < parts.total_images:  # a resumed run writes its record with its first checkpoint
                record.keep()
            folder.begin(parts.total_images)
        if folder.is_mine:
            self.mirroring.begin()
        writer = None
        if folder.is_mine and not settled:
            evaluated = snapshot is not None and snapshot.numbers.evaluated_at == images
            writer = MetricsWriter(folder.path, images, parts.config.run.loggers, evaluated=evaluated)
            if writer.note:
                print_line(writer.note)
            self.on_error.callback(writer.close, "failed", logger_wait=self._logger_wait)
        title = f"{Path(parts.config.recipe_name).stem} → {folder.path}"
        with Display(parts.total_images, images, title, parts.world.is_first, parts.epoch_images) as display:
            outputs = Outputs(folder, writer, display, record.on_saved)
            loop = Loop(parts, outputs, snapshot=snapshot, evaluator=self.evaluator, stop=stop)
            if not settled:
                with parts.strategy.whole_weights():
                    for evaluator in filter(None, (self.evaluator, self.final_evaluator)):
                        rehearse(evaluator)
                loop.run()
        return loop, writer

    def evaluate(self, loop: Loop, writer: MetricsWriter | None) -> None:
        """Evaluate the best checkpoint on the test split, or the last one if no best can be used; print the metrics."""
        if self.parts.world.is_first:
            print_line(self._describe_end(loop, writer))
        if not self.final_evaluator:
            return
        world, images = self.parts.world, loop.best.images if loop.best else loop.images
        snapshot, problem = checkpoint_at(self.folder, world, images, mapped=self._reads_rows)
        if snapshot is None and images < loop.images:  # damaged since, or the only host that had it is lost
            if world.is_first:
                print_line(f"the best {problem}; evaluating the last one instead, at {loop.images:,} images")
            loop.best, images = None, loop.images
            snapshot, problem = checkpoint_at(self.folder, world, images, mapped=self._reads_rows)
        if snapshot is None:
            raise UserError(problem)
        load_weights(self.parts.recipe, snapshot.weights, ema=True)
        del snapshot  # its tensors are no longer needed
        with (
            self.parts.strategy.whole_weights(),
            Counter("evaluating on the test split", self.final_evaluator.count) as counter,
        ):
            try:
                results = self.final_evaluator.measure(counter.update, loop.stop.has_arrived)
            except EvaluationStopped:
                loop.stopped = True
                return
        metrics = {f"test/{name}": value for name, value in results.items()}
        if writer:
            lines = read_metrics(self.folder.path)
            if not any(
                line["images"] == loop.images and line.get("test/checkpoint_images") == images for line in lines
            ):
                writer.write(loop.images, metrics | {"test/checkpoint_images": float(images)})
        if world.is_first:
            texts = [f"{name} {text}" for name, text in self.final_evaluator.texts(results).items()]
            print_line(f"test metrics for the checkpoint at {images:,} images: {'  '.join(texts)}")

    def _describe_end(self, loop: Loop, writer: MetricsWriter | None) -> str:
        """Return how long training took and the best metric during training, with its position."""
        spent = f"trained for {duration(writer.seconds)}" if writer else "nothing left to train"
        if not loop.best or not self.evaluator:
            return spent
        best = loop.best
        name = best.name.partition("/")[2]
        text = self.evaluator.texts({name: best.value}).get(best.name, four_digits(best.value))
        at = epoch(best.images, self.parts.total_images, self.parts.epoch_images)
        return f"{spent}; best: {best.name} {text} at {at} ({best.images:,} images)"

    def close(self, loop: Loop, writer: MetricsWriter | None) -> int:
        """Record how the run ended; wait for its mirror and for the other ranks. Return the exit code."""
        state = "stopped" if loop.stopped else "finished"
        if writer:
            wait = LOGGER_SECONDS_AFTER_STOP if loop.stop.has_arrived() else math.inf
            writer.close(state, self._trained_weights(loop), min(wait, self._logger_wait))
        self.folder.end(state)
        if loop.saver.num_saves and self.parts.world.is_first:
            print_line(loop.pace.describe_shares())
            print_line(loop.saver.describe_cost(loop.stopwatch.seconds["save"]))
        if loop.stopped:
            print_line(f"stopped at {loop.images:,} images and saved; run the same command again to resume")
        else:
            print_line(f"run: {self.folder.path}")
        is_mirrored = self.mirroring.finish(is_stopping=loop.stop.has_arrived)
        self.output.close()  # left open after an error, so that the log includes the traceback
        self.parts.world.wait_for_all()  # a launcher ends the other ranks when one exits with a nonzero code
        return loop.stop.exit_code if loop.stopped else 0 if is_mirrored else MIRROR_INCOMPLETE

    @property
    def _reads_rows(self) -> bool:
        """Whether this process reads only its own rows of a checkpoint, because the weights are sharded."""
        return self.parts.strategy.shards_weights and self.parts.world.size > 1

    @property
    def _logger_wait(self) -> float:
        run = self.parts.config.run
        return min(run.logger_wait, run.timeout / 2)  # a longer wait would count as a hang

    def _trained_weights(self, loop: Loop) -> Path | None:
        """Return the weights file of the best checkpoint, or of the last one if there is no best."""
        tried = [loop.best.images] if loop.best else []
        files = (self.folder.checkpoints.path(images) / WEIGHTS for images in (*tried, loop.images))
        return next((file.absolute() for file in files if file.exists()), None)


@dataclass
class Record:
    """The settings, versions and hardware of a run, written at the start or, after a resume, with a new checkpoint."""

    session: Session
    snapshot: Snapshot | None
    is_kept: bool = False

    def keep(self) -> None:
        """Write the record, unless it is already written."""
        if self.is_kept:
            return
        parts, folder = self.session.parts, self.session.folder
        images = self.snapshot.images if self.snapshot else 0
        if images >= parts.total_images and folder.config_file.exists():
            folder.record_length(parts.config)
        else:
            provenance = Provenance(self.session.describe_data(), _choices(parts), versions_and_hardware())
            folder.record_settings(parts.config, provenance, images)
        write_data_spec(folder.path, parts.trained_spec())
        self.is_kept = True

    def on_saved(self) -> None:
        """Write the record with a new checkpoint, and notify the mirror."""
        self.keep()
        self.session.mirroring.notify()


@contextmanager
def open_session(parts: Parts, folder: RunFolder) -> Iterator[Session]:
    """Open a run folder for this process and release it at the end.

    A full disk, a full device and a killed loader process are reported as a UserError.
    """
    mirroring = Mirroring(parts.config, folder, parts.world.is_first)
    on_error = ExitStack()
    interrupted = False
    try:
        activity("preparing to train")
        evaluator, final = training_evaluator(parts), final_evaluator(parts)
        parts.notes.extend(evaluator.notes if evaluator else ())
        if parts.recipe.evaluation.evaluator and is_never(parts.config.run.evaluate_every):
            parts.notes.append(
                "evaluate_every=never: this run is not evaluated; use `paceline evaluate` after training"
            )
        data = cache(lambda: describe_samples(parts.loaders["train"].source))
        claim_folder(folder, parts.world, lambda: mirroring.prepare(data()))
        output = log_output(folder.path, parts.world.rank)
        yield Session(parts, folder, mirroring, output, on_error, evaluator, final, data)
    except KeyboardInterrupt:
        interrupted = True
        folder.end("stopped", "a second Ctrl-C stopped the run immediately")
        raise
    except UserError as error:
        folder.check_present()  # if the folder was removed, other errors are a result of that
        folder.end("failed", str(error))
        raise
    except Exception as error:
        if isinstance(error, OSError):
            folder.check_present()
        problem = _user_problem(error, folder, parts) or parts.world.explain(error)
        folder.end("failed", problem or f"{type(error).__name__}: {error}")
        if problem:
            raise UserError(f"--out {folder.path}: {problem}; {folder.checkpoints.describe_newest()}") from error
        raise
    except BaseException as error:
        folder.end("failed", type(error).__name__)
        raise
    finally:
        if not interrupted:
            on_error.close()
        mirroring.finish(at_most=0.0 if interrupted else SECONDS_FOR_MIRROR_AFTER_ERROR)
        folder.release()
        for loader in parts.loaders.values():
            loader.close()


def _user_problem(error: Exception, folder: RunFolder, parts: Parts) -> str:
    """Describe the failed disk, full device or dead worker that caused an error; empty if it has a different cause."""
    found = ""
    if isinstance(error, torch.OutOfMemoryError):
        found = explain_out_of_memory(error, parts)
    elif isinstance(error, OSError) and error.errno in DISK_FAILED:
        found = str(error.strerror)
    elif isinstance(error, OSError) and error.errno in NOT_WRITABLE and isinstance(error.filename, str):
        found = f"{error.filename}: {error.strerror}" if Path(error.filename).is_relative_to(folder.path) else ""
    return describe_dead_worker() or found


def _choices(parts: Parts) -> Choices:
    """Return the values chosen for settings that are "auto"."""
    run, accelerator = parts.config.run, parts.world.device.type
    loader = type(parts.loaders["train"]).__module__.rpartition(".")[2]
    workers = run.workers if parts.loaders["train"].uses_workers else 0
    return Choices(*strategy_name(run.strategy, run.devices, accelerator), accelerator, loader, workers)
