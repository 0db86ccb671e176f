"""How a run proceeds: what is logged, judged, saved, and when it stops. Everything is counted in images seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from paceline.config.spans import Span
from paceline.contracts.recipe import Batch
from paceline.core.errors import UserError
from paceline.core.heartbeat import beat
from paceline.data.draws import number_from
from paceline.data.feed import StepData
from paceline.evaluation.contract import Evaluator
from paceline.images.grids import grid
from paceline.runs.display import Display
from paceline.runs.folder import RunFolder
from paceline.runs.gpu import GpuReadings
from paceline.runs.metrics import MetricsWriter
from paceline.runs.saver import Saver
from paceline.runs.snapshot import Best, Snapshot
from paceline.training.build import Parts
from paceline.training.evaluate import SplitEvaluator, evaluated_weights
from paceline.training.loss_log import Ledger
from paceline.training.replicas import check_replicas
from paceline.training.sampling import fixed_draws, make_pictures
from paceline.training.snapshot import restore_snapshot, take_snapshot
from paceline.training.stop import StopRequest, StopVote
from paceline.training.stopwatch import Stopwatch
from paceline.training.strips import has_strips, make_strips, strip_samples

NUM_SAMPLES = 64  # pictures on a grid


class Loop:
    """Cadence around the step: log, evaluate, save, stop."""

    def __init__(self, parts: Parts, folder: RunFolder, stop: StopRequest) -> None:
        self.parts, self.folder = parts, folder
        self.world, self.step, self.recipe = parts.world, parts.step, parts.recipe
        self.asked_to_stop = StopVote(parts.world, stop)
        self.ledger = Ledger(parts.world)
        self.saver = Saver(folder.checkpoints)
        self.on_saved: Callable[[], None] = lambda: None  # called beside the loop when a checkpoint is there
        self.images = 0
        self.best: Best | None = None
        self.stopped = False
        self.strip_samples: list[Batch] = []
        self.stopwatch = Stopwatch()
        lengths = {"epoch": parts.epoch_images, "step": parts.feed.images_per_step, "total": parts.total_images}
        run = parts.config.run
        self.every = {
            name: max(1, Span.parse(text, name).to_images(**lengths))
            for name, text in (
                ("log_every", run.log_every),
                ("evaluate_every", run.evaluate_every),
                ("sample_every", run.sample_every),
                ("save_every", run.save_every),
            )
        }
        self.split_evaluator, self.evaluator = self._appoint_judge()
        self._logged_at = self._evaluated_at = self._sampled_at = self._saved_at = -1
        self._images_before_log = 0
        self._saving_seconds = 0.0
        self.check_every = run.check_replicas if self.world.size > 1 else 0

    def _appoint_judge(self) -> tuple[SplitEvaluator | None, Evaluator | None]:
        """Who judges while training; refuses at once what could not be judged later."""
        parts, split = self.parts, self.recipe.evaluated_on
        if not self.recipe.evaluator or split not in parts.loaders:
            return None, None
        split_evaluator = SplitEvaluator(
            self.recipe, parts.loaders[split], split, self.world, parts.precision, parts.config.run
        )
        evaluator = split_evaluator.prepare()
        parts.notes.extend(evaluator.notes)
        return split_evaluator, evaluator

    def resume(self, snapshot: Snapshot | None) -> None:
        """Goes on from a snapshot, or from the start where there is none."""
        if snapshot:
            restore_snapshot(snapshot, self.step)
            self.images = self._saved_at = self._logged_at = snapshot.images
            self.best = snapshot.numbers.best
            self._evaluated_at = snapshot.numbers.evaluated_at
        self._images_before_log = self.images

    def attach(self, writer: MetricsWriter | None, display: Display) -> None:
        """Where the numbers go; only a process that writes a run's folder has a writer."""
        self.writer, self.display = writer, display
        if writer and self.evaluator and self.evaluator.protocol():
            split, label, protocol = self.recipe.evaluated_on, self.evaluator.label, self.evaluator.protocol()
            self.folder.keep_protocol(split, label, protocol, afresh=self.images == 0)
        if writer and has_strips(self.recipe):
            evaluated_on = self.parts.loaders.get(self.recipe.evaluated_on, self.parts.loaders["train"])
            self.strip_samples = strip_samples(evaluated_on.source, self.world.device, self.parts.precision)
        self.gpu = GpuReadings(self.world.device.index if self.world.device.type == "cuda" else None)

    def run(self) -> None:
        """Trains to the end, or until a stop is asked for."""
        self.recipe.train()
        with self.saver:
            if self.images == 0:
                self._sample()
            self.parts.strategy.drive(self._steps(), self.advance)
            if not self.stopped:
                self._log()
                self._evaluate()
                self._sample()
                self._save()

    def _steps(self) -> Iterator[StepData]:
        steps = self.parts.feed.steps(self.images, self.parts.total_images)
        while not self.stopped:
            with self.stopwatch("data"):
                data = next(steps, None)
            if data is None:
                return
            yield data

    def advance(self, data: StepData) -> None:
        """One step and what is due after it."""
        if self.stopped:  # a driver that reads ahead may bring one step more
            return
        beat()
        self.saver.check()
        self._seed_dropout(data.images)
        with self.stopwatch("step"):
            self.ledger.enter(data.images, self.parts.run_step(data))
        before, self.images = data.images, data.images + self.parts.feed.images_per_step
        if self._due("log_every", before):
            self._log()
        if self._due("evaluate_every", before):
            self._evaluate()
        if self._due("sample_every", before):
            self._sample()
        if self._due("save_every", before):
            self._save()
        if self.check_every and (self.images // self.parts.feed.images_per_step) % self.check_every == 0:
            check_replicas(self.recipe, self.world)
        if self.asked_to_stop():
            self._save()
            self.stopped = True

    def _due(self, name: str, before: int) -> bool:
        return self.images // self.every[name] > before // self.every[name]

    def _seed_dropout(self, images: int) -> None:
        for number, generator in enumerate(self.parts.strategy.generators()):
            seed = number_from(self.parts.config.run.seed, images, "dropout", self.world.rank, number)
            generator.manual_seed(seed)

    def _log(self) -> None:
        """Reads the ledger once for all ranks, and goes no further where a loss is not finite."""
        if self._logged_at == self.images:
            return
        with self.stopwatch("log"):
            reading = self.ledger.read()
        self._logged_at = self.images
        if reading.not_finite:
            at, phase, name = reading.not_finite
            self.saver.wait()
            self.world.wait_for_all()  # all read the same; whoever tells it first knows then what is left
            self._refuse(f"loss {name!r} of phase {phase!r} is not finite", at)
        values = reading.values | self._timings()
        rates = {f"lr/{name}": learner.learning_rate(self.images) for name, learner in self.step.learners.items()}
        self._write(values | rates | self.gpu.read())
        self.display.update(self.images, values)

    def _refuse(self, what: str, at: int) -> None:
        number = at // self.parts.feed.images_per_step
        self.saver.wait()  # what is left is known then
        raise UserError(
            f"{what} at step {number} ({at:,} images seen); {self.folder.checkpoints.what_is_left()}. "
            "A lower --lr, --precision fp32 or --set clip=1 may help"
        )

    def _timings(self) -> dict[str, float]:
        spent = self.stopwatch.take()
        total = max(spent.pop("total"), 1e-9)
        images, self._images_before_log = self.images - self._images_before_log, self.images
        waiting = spent.get("data", 0.0)
        return {
            "time/images_per_second": images / total,
            "time/images_per_second_without_loading": images / max(total - waiting, 1e-9),
            "time/data_wait": waiting / total,
            **{f"time/{name}_seconds": seconds for name, seconds in spent.items()},
            "epoch": self.images / self.parts.epoch_images,
        }

    def _evaluate(self) -> None:
        if not self.split_evaluator or self._evaluated_at == self.images:
            return
        self._log()
        self._evaluated_at = self.images
        if self._saved_at == self.images:
            self._saved_at = -1  # what was found is kept in the checkpoint, also in one that was written before
        with self.stopwatch("evaluate"), evaluated_weights(self.recipe, self.step.learners):
            results = self.split_evaluator.measure()
        values = {f"{self.split_evaluator.split}/{name}": value for name, value in results.items()}
        self._write(values | {"time/evaluation_seconds": self.stopwatch("evaluate").seconds})
        self.display.line(f"{self.images:>12,} images  " + describe(values))
        wanted, end = self.recipe.best
        name = next((name for name in values if name.partition("[")[0] == wanted), "")
        if name and self._is_best(name, values[name], end):
            self.best = Best(name, values[name], self.images)
            self._save()

    def _is_best(self, name: str, value: float, end: str) -> bool:
        """Whether a value beats the best one so far; one by another network is no measure for it."""
        before = self.best.value if self.best and self.best.name == name else None
        if before is None:
            return not math.isnan(value)
        return value > before if end == "max" else value < before

    def _sample(self) -> None:
        """Keeps what the recipe makes of the same random numbers, or of the same samples, as always."""
        if not self.writer or self._sampled_at == self.images:
            return
        if self.recipe.generates or self.strip_samples:
            with self.stopwatch("sample"), evaluated_weights(self.recipe, self.step.learners):
                self.writer.image("samples", self.images, self._picture())
        self._sampled_at = self.images

    def _picture(self) -> np.ndarray:
        precision = self.parts.precision
        if not self.recipe.generates:
            return np.asarray(make_strips(self.recipe, self.strip_samples, precision))
        draws = fixed_draws(self.recipe, self.parts.feed.drawer, NUM_SAMPLES)
        return grid(make_pictures(self.recipe, draws, precision))

    def _save(self) -> None:
        if self._saved_at == self.images:
            return
        self._log()  # refuses to go on where a loss is not finite
        section = self.stopwatch("save")
        before = section.seconds
        with section:
            for name, learner in self.step.learners.items():
                if not learner.is_finite():  # a finite loss can have a gradient that is not
                    self._refuse(f"network {name!r} has weights that are not finite", self.images)
            if self.folder.is_mine:
                assert self.writer
                self.saver.wait()
                self.saver.save(
                    take_snapshot(self.images, self.step, self.best, self._evaluated_at),
                    self.parts.config.run.keep,
                    self.best.images if self.best else None,
                    before=self.writer.flush,  # a checkpoint never outruns its metrics
                    after=self.on_saved,
                )
        self._saving_seconds += section.seconds - before
        self._saved_at = self.images

    def cost_of_saving(self) -> str:
        """What checkpoints cost, for a person: the loop's time, and that of the thread beside it."""
        number, beside = self.saver.num_saves, self.saver.seconds
        checkpoints = "1 checkpoint" if number == 1 else f"{number} checkpoints"
        return f"saved {checkpoints}: {self._saving_seconds:.2f} s of the loop, {beside:.2f} s beside it"

    def _write(self, values: dict[str, float]) -> None:
        if self.writer:
            self.writer.write(self.images, values)


def describe(values: dict[str, float]) -> str:
    """Metrics as a person reads them on one line."""
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items() if not name.endswith("/count"))
