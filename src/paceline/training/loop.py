"""The training loop: when to log, evaluate, sample, save and stop."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from paceline.config.settings import INTERVALS, RunSettings, is_never, parse_interval
from paceline.contracts.recipe import Recipe, single_networks
from paceline.core.errors import UserError
from paceline.core.watch import beat, longest_gap, recorder
from paceline.data.loader import StepData
from paceline.data.stream import number_from
from paceline.parallel.shards import is_sharded
from paceline.parallel.world import BackgroundGroup, World
from paceline.runs.checkpoint import Best, Saver, Snapshot
from paceline.runs.folder import RunFolder, suggest_other_folder
from paceline.runs.metrics import EVALUATION_SECONDS, REAL_IMAGES, MetricsWriter
from paceline.runs.readings import GpuReadings, HostReadings
from paceline.runs.terminal import Display
from paceline.training.build import Parts
from paceline.training.evaluate import EvaluatedWeights, EvaluationStopped, SplitEvaluator, explained, is_better
from paceline.training.log import LossLog, Pace, Request, Work, collapse
from paceline.training.previews import Previews
from paceline.training.profiler import StepProfiler
from paceline.training.resume import take_snapshot
from paceline.training.stop import PATIENCE_SECONDS, DataWaitEnded, StopRequest, StopVote

TRAINED_PER_EVALUATED = 4  # images to train on, at least, per image to evaluate, which needs about a third of the work
MIN_STEPS = 10  # between two evaluations, since each one takes some time for any number of images
FEW, MANY = 3, 50  # evaluations per run: as many in spite of `MIN_STEPS`, and at most


class Cadence:
    """How many images lie between two logs, evaluations, samples or checkpoints; one number per setting.

    A setting that is `never` has no number. `evaluated` is the size of the evaluated split in training images.
    """

    def __init__(self, run: RunSettings, *, epoch: int, step: int, total: int, evaluated: float = 0.0) -> None:
        lengths = {"epoch": epoch, "step": step, "total": total}
        spans = {name: parse_interval(getattr(run, name), name) for name in INTERVALS}
        self._every = {name: max(1, span.to_images(**lengths)) for name, span in spans.items() if span}
        self.note = ""
        for name in (name for name, span in spans.items() if span and not span.amount):
            size = evaluated if name == "evaluate_every" else 0.0
            self._every[name] = automatic_interval(**lengths, evaluated=size)
            if name == "evaluate_every" and evaluated and max(epoch, step) < self._every[name]:
                self.note = _describe(self._every[name] // epoch, ends=self._every[name] >= total)

    def is_due(self, name: str, before: int, after: int) -> bool:
        """Return whether something is due after a step, given the images seen before and after it."""
        every = self._every.get(name)
        return every is not None and after // every > before // every


def automatic_interval(*, epoch: int, step: int, total: int, evaluated: float) -> int:
    """Return an interval of whole epochs, which depends on numbers of images only, so that every machine uses the same.

    The shorter the run and the larger the evaluated split, the fewer evaluations.
    """
    at_least = max(total / MANY, min(MIN_STEPS * step, total / FEW), TRAINED_PER_EVALUATED * evaluated)
    return max(1, math.ceil(at_least / epoch)) * epoch


def _describe(epochs: int, *, ends: bool) -> str:
    interval = "only at the end" if ends else f"every {epochs} epochs"
    return f"evaluation: {interval} (evaluate_every=auto); use --set 'evaluate_every=1 epochs' for every epoch"


def check_replicas(recipe: Recipe, world: World) -> None:
    """Raise RuntimeError if the weights of a network differ between ranks."""
    networks = single_networks(recipe)
    rows = world.gather(torch.stack([_checksum(network) for network in networks.values()]))
    for name, column in zip(networks, rows.unbind(1), strict=True):
        if (column != column[0]).any():
            ranks = [rank for rank, value in enumerate(column.tolist()) if value != column[0].item()]
            raise RuntimeError(f"the replicas of network {name!r} differ: ranks {ranks} do not match rank 0")


def _checksum(network: nn.Module) -> Tensor:
    """Return a sum over the bit patterns of all parameters that are not sharded, weighted by position."""
    total = torch.zeros((), dtype=torch.int64, device=next(network.parameters()).device)
    replicated = (parameter for parameter in network.parameters() if not is_sharded(parameter))
    for number, parameter in enumerate(replicated, start=1):
        bits = parameter.detach().contiguous().view(torch.int32).flatten().long()
        total += number * (bits * torch.arange(1, bits.numel() + 1, device=bits.device)).sum()
    return total


SMALLER_LR = 0.1  # factor on the learning rate in the suggested command


def explain_divergence(what: str, at: int, parts: Parts, folder: RunFolder) -> str:
    """Return the error message for what went wrong after `at` images.

    A run keeps its learning rate when it resumes, so a run that has checkpoints cannot be repaired in its own folder.
    """
    config, out, flags = parts.config, folder.path, []
    if folder.checkpoints.all():
        is_stage = any(out.name in stages for stages in config.recipe_class.stages.values())
        flags += [] if is_stage else ["--init-from", shlex.quote(str(out))]  # a stage has its own initial weights
        flags.append(suggest_other_folder(out, config))
    rates = {name: config.learner_of(name).lr for name, values in config.networks.items() if "lr" in values}
    if rates.keys() < parts.recipe.networks.keys():
        flags.append(f"--lr {config.learner.lr * SMALLER_LR:g}")
    flags += [f"--set {name}.lr={lr * SMALLER_LR:g}" for name, lr in rates.items()]
    remedies = ["a lower learning rate"]
    remedies += [] if parts.precision.name in ("fp32", "fp64") else ["--precision fp32"]
    remedies += [] if config.learner.clip else ["--set clip=1"]
    where = f"{what} at step {at // parts.feed.images_per_step} ({at:,} images seen)"
    problem = f"{where}; {folder.checkpoints.describe_newest()}"
    return f"{problem}. {' or '.join(remedies).capitalize()} may help: add {' '.join(flags)} to the command"


PATIENCE_WITH_SAVES = 60.0  # how long a rank that does not save waits, after a stop request, for the one that does
BETWEEN_STEPS = "between steps"  # where collectives run that belong to no phase, in the flight recorder


@dataclass(frozen=True)
class Outputs:
    """Where the loop writes metrics, images and checkpoints."""

    folder: RunFolder
    writer: MetricsWriter | None  # None in a process that does not write to the run folder
    display: Display
    on_saved: Callable[[], None] = lambda: None  # called by the saving thread after each checkpoint


class Loop:
    """Runs the steps, and logs, evaluates, samples and saves between them. The snapshot must already be restored."""

    def __init__(
        self,
        parts: Parts,
        outputs: Outputs,
        *,
        snapshot: Snapshot | None = None,
        evaluator: SplitEvaluator | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        self.parts, self.outputs, self.evaluator = parts, outputs, evaluator
        self.world, self.step, self.recipe, run = parts.world, parts.step, parts.recipe, parts.config.run
        self.stop = stop or StopRequest()
        self.stop_requested = StopVote(parts.world, self.stop)
        self.evaluated = EvaluatedWeights(parts.step, parts.feed)
        self.loss_log, self.recorder = LossLog(parts.world), recorder()
        self.saver = Saver(outputs.folder.checkpoints, self._writers())
        self.gpu = GpuReadings(self.world.device.index if self.world.device.type == "cuda" else None)
        self.host = HostReadings(outputs.folder.path)
        self.previews = Previews(parts) if outputs.writer and not is_never(run.sample_every) else None
        lengths = {"epoch": parts.epoch_images, "step": parts.feed.images_per_step, "total": parts.total_images}
        self.cadence = Cadence(run, **lengths, evaluated=evaluator.size_in(parts.trained_spec()) if evaluator else 0.0)
        self.check_every = run.check_replicas if self.world.size > 1 else 0
        self.defers_log = self.world.device.type == "cuda"
        self.stopped, self.images = False, 0
        self.best: Best | None = None
        self._missed_best = False  # whether the user has been told that the metric for the best checkpoint is missing
        self._logged_at = self._evaluated_at = self._sampled_at = self._saved_at = -1
        self._suspect = ""  # a value that must vary, but was zero in the last step that was read
        self._requested: tuple[int, Request] | None = None  # losses that are not logged yet, and the images seen
        if snapshot:
            self.images = self._saved_at = self._logged_at = snapshot.images
            self.best = snapshot.numbers.best
            self._evaluated_at = snapshot.numbers.evaluated_at
        self._began_at, self.stop.patience_after = self.images, self._patience
        self.pace = Pace(self.world, self.images, parts.epoch_images)
        self.stopwatch = self.pace.stopwatch
        self.profiler = StepProfiler(parts, self.stopwatch, outputs.folder.path, self.images) if run.profile else None
        if outputs.writer and evaluator:
            evaluator.record_protocol(outputs.folder, overwrite=self.images == 0)

    def _writers(self) -> BackgroundGroup | None:
        """Return the processes that write checkpoints together; None if one process has all weights."""
        if not self.parts.strategy.shards_weights or self.world.size == 1:
            return None
        folder = self.outputs.folder
        if self.world.sum(torch.tensor([float(folder.is_mine)], device=self.world.device)).item() > 1:
            raise UserError(
                f"--out {folder.path}: each host has its own folder, but the hosts of a sharded run must share one; "
                "use a folder on a shared file system, or --strategy ddp"
            )
        return BackgroundGroup(self.world, self.parts.config.run.timeout)

    def run(self) -> None:
        """Train to the end, or until a stop is requested."""
        self.recipe.train()
        if self.cadence.note:
            self.outputs.display.line(self.cadence.note)
        with self.saver:
            if self.images == 0:
                with explained(f"{type(self.recipe).__name__}: generating the sample images"):
                    self._sample()
                    self._show_real_images()
            before = self.images - self.parts.feed.images_per_step
            if self.images and self.cadence.is_due("evaluate_every", before, self.images):
                self._evaluate()  # unless it is complete: a stop request may have ended it
            self.parts.strategy.drive(self._steps(), self.advance)
            if not self.stopped:
                self._log()
                self._sample()
                self._evaluate()
                self._save()
            if self.outputs.writer:
                self.outputs.writer.wait_for_images()
        if self.profiler:
            self.profiler.finish()

    def _steps(self) -> Iterator[StepData]:
        steps = self.parts.feed.steps(self.images, self.parts.total_images)
        while not self.stopped:
            try:
                with self.stopwatch("data"), self.stop.ending_data_wait() if self.world.size == 1 else nullcontext():
                    data = next(steps, None)
            except DataWaitEnded:
                self._save()
                self.stopped = True
                return
            if data is None:
                return
            yield data

    def _patience(self) -> float:
        """Return how many seconds this run may make no progress after a stop request."""
        if self.images in (self._began_at, self.saver.saved_at):
            return PATIENCE_SECONDS
        if self._saved_at != self.images:
            return max(PATIENCE_SECONDS, 3 * longest_gap())
        return math.inf if self.outputs.folder.is_mine or self.stopped else PATIENCE_WITH_SAVES

    def advance(self, data: StepData) -> None:
        """Run one step, then log, evaluate, sample and save if due."""
        if self.stopped:  # a strategy that prefetches may pass one more step
            return
        beat()
        self.saver.check()
        self._seed_dropout(data.images)
        self.recorder.step = data.images // self.parts.feed.images_per_step
        if self.profiler:
            self.profiler.before_step()
        with self.pace.step():
            self.loss_log.add(data.images, self.parts.run_step(data))
        if self.profiler:
            self.profiler.after_step()
        self.recorder.where = BETWEEN_STEPS
        self._finish_log()
        before, self.images = data.images, data.images + self.parts.feed.images_per_step
        due = partial(self.cadence.is_due, before=before, after=self.images)
        if due("log_every"):
            self._request_log()
        self.outputs.display.tick(self.images)  # after the log, so that a line shows the losses up to this step
        if due("sample_every"):  # before the evaluation, which may save: a checkpoint follows its samples
            self._sample()
        if due("evaluate_every"):
            self._evaluate()
        if due("save_every"):
            self._save()
        if self.check_every and (self.images // self.parts.feed.images_per_step) % self.check_every == 0:
            check_replicas(self.recipe, self.world)
        if self.stopped or self.stop_requested():
            self._save()
            self.stopped = True

    def _seed_dropout(self, images: int) -> None:
        for number, device in enumerate(dict.fromkeys(self.parts.strategy.local_devices)):
            on_gpu = device.type == "cuda"
            generator = torch.cuda.default_generators[device.index] if on_gpu else torch.default_generator
            seed = number_from(self.parts.config.run.seed, images, "dropout", self.world.rank, number)
            generator.manual_seed(seed)

    def _log(self) -> None:
        """Log the losses of all ranks now; raise UserError if one is not finite or has diverged."""
        self._finish_log()
        if self._logged_at != self.images:
            self._request_log()
            self._finish_log()

    def _request_log(self) -> None:
        """Collect the losses and log them; on a GPU, while the next step runs, so that the GPU does not wait."""
        with self.stopwatch("log"):
            self._requested = self.images, self.loss_log.request(self.pace.own_work())
        self._logged_at = self.images
        if not self.defers_log:
            self._finish_log()

    def _finish_log(self) -> None:
        if self._requested is None:
            return
        (images, request), self._requested = self._requested, None
        with self.stopwatch("log"):
            reading = request.wait()
        if problem := reading.problem(self.recipe, images):
            self._fail(*problem)
        self._suspect = reading.suspect(self.recipe)
        values = reading.values | self.pace.take(images, [Work(*one) for one in reading.ranks])
        rates = {f"lr/{name}": learner.learning_rate(images) for name, learner in self.step.learners.items()}
        if self.outputs.writer:
            self.outputs.writer.write(images, values | rates | self.gpu.read() | self.host.read())
        self.outputs.display.update(images, values)

    def _fail(self, what: str, at: int) -> None:
        self.saver.wait()
        self.world.wait_for_all()  # so that every rank reports the same checkpoints
        raise UserError(explain_divergence(what, at, self.parts, self.outputs.folder))

    def _evaluate(self) -> None:
        if not self.evaluator or self._evaluated_at == self.images:
            return
        self._log()
        split, known, before = self.evaluator.split, len(self.evaluator.notes), self.stopwatch.seconds["evaluate"]
        try:
            evaluating = self.outputs.display.during(f"evaluating on the {split} split")
            with self.stopwatch("evaluate"), evaluating, self.evaluated.at(self.images):
                results = self.evaluator.measure(self._show_evaluation, self.stop.has_arrived)
        except EvaluationStopped:
            self.stopped = True  # the resumed run evaluates this checkpoint
            return
        self._evaluated_at = self.images
        if self._saved_at == self.images:
            self._saved_at = -1  # save again, since checkpoints store evaluation results
        for note in self.evaluator.notes[known:]:
            self.outputs.display.line(note)
        values = {f"{self.evaluator.split}/{name}": value for name, value in results.items()}
        if self.outputs.writer:
            spent = self.stopwatch.seconds["evaluate"] - before
            self.outputs.writer.write(self.images, values | {EVALUATION_SECONDS: spent})
        best_metric, mode = self.recipe.evaluation.best, self.recipe.evaluation.mode
        name = next((name for name in values if name.partition("[")[0] == best_metric), "")
        is_best = bool(name) and is_better(values[name], name, self.best, mode)
        texts = [f"{name} {text}" for name, text in self.evaluator.texts(results).items()]
        place = self.outputs.display.position(self.images)
        self.outputs.display.line("  ".join([place, *texts, *(["(best so far)"] if is_best else [])]))
        if best_metric and not name and not self._missed_best:
            self._missed_best = True
            self.outputs.display.line(
                f"best: the last checkpoint, since there is no metric {best_metric!r}; available: {', '.join(values)}"
            )
        if is_best:
            self.best = Best(name, values[name], self.images)
            self._save()

    def _show_evaluation(self, seen: int) -> None:
        assert self.evaluator
        split, count = self.evaluator.split, self.evaluator.count
        self.outputs.display.busy(f"evaluating on the {split} split: {seen:,} of {count:,} samples")

    def _sample(self) -> None:
        """Write the recipe's sample images, always computed from the same noise or samples."""
        if self._sampled_at == self.images:
            return
        # every process takes part, but only one writes
        with self.stopwatch("sample"), self.outputs.display.during("sample images"), self.evaluated.at(self.images):
            if self.outputs.writer and self.previews:
                arrange = self.previews.render()
                if self.images == 0:  # an error in the recipe's code is reported before training
                    arranged = arrange()
                    self.outputs.writer.image("samples", 0, lambda: arranged)
                else:
                    self.outputs.writer.image("samples", self.images, arrange)
        self._sampled_at = self.images

    def _show_real_images(self) -> None:
        """Write real images for comparison with the generated images."""
        if self.outputs.writer and self.previews:
            with self.stopwatch("sample"):
                real = self.previews.real()
                if real is not None:
                    self.outputs.writer.image(REAL_IMAGES, 0, real)

    def _save(self) -> None:
        if self._saved_at == self.images:
            return
        self._log()  # raises if a loss is not finite or has diverged
        if self._suspect:
            self._fail(collapse(self._suspect), self.images)
        with self.stopwatch("save"), self.outputs.display.during("saving"):
            self._check_weights()
            statistics = self.evaluated.statistics(self.images)  # every process takes part
            if self.outputs.folder.is_mine or self.saver.writers:
                self.saver.wait()
                self.saver.save(
                    take_snapshot(self.images, self.step, self.best, self._evaluated_at, statistics),
                    self.parts.config.run.keep,
                    self.best.images if self.best else None,
                    before=self._before_saving,
                    after=self.outputs.on_saved,
                )
        self._saved_at = self.images

    def _check_weights(self) -> None:
        """Raise UserError if a weight is not finite in any process: a finite loss can have non-finite gradients."""
        finite = torch.stack([learner.are_finite() for learner in self.step.learners.values()])
        for name, processes in zip(self.step.learners, self.world.sum((~finite).float()).tolist(), strict=True):
            if processes:
                self._fail(f"network {name!r} has weights that are not finite", self.images)

    def _before_saving(self) -> None:
        assert self.outputs.writer
        self.outputs.folder.check_present()
        self.outputs.writer.flush()  # so that a checkpoint is never newer than its metrics
