"""The speed of the loop between two log lines, and the rank that slows it down."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.core.printable import print_line
from paceline.parallel.exchange import waiting
from paceline.parallel.world import World
from paceline.runs.metrics import NO_STRAGGLER, RANK_SECONDS, STRAGGLER_RANK, STRAGGLER_SLOWDOWN, TRAINING_SECONDS
from paceline.runs.profile_summary import SECTION_NAMES
from paceline.training.stopwatch import Stopwatch, with_other, with_whole_steps
from paceline.training.stragglers import MIN_STEPS, StepTimes, StragglerWatch, Work

MAX_STEPS = 1000  # steps whose times are kept; the median of more steps would be as accurate
NOT_TRAINING = ("evaluate", "sample", "save")  # sections during which the loop does not train


class Pace:
    """Measures the loop of one rank. `images` is the number of images seen when the loop starts."""

    def __init__(self, world: World, images: int, epoch_images: int) -> None:
        self.stopwatch = Stopwatch()
        self._world, self._images_before, self._epoch_images = world, images, epoch_images
        self._data, self._step = self.stopwatch("data"), self.stopwatch("step")
        self._on_cpu = world.device.type == "cpu"
        self._data_before = 0.0  # seconds of waiting for data at the end of the last step
        self._steps: deque[StepTimes] = deque(maxlen=MAX_STEPS)  # the last steps since the ranks were compared
        self._stragglers = StragglerWatch()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time one step, and record how long this rank worked on it: `with pace.step(): …`."""
        self.stopwatch.end_start_up()
        step, waited = self._step.seconds, waiting.seconds  # an evaluation or a log before the step may have waited
        with self._step:
            yield
        step, waited = self._step.seconds - step, waiting.seconds - waited
        data, self._data_before = self._data.seconds - self._data_before, self._data.seconds
        # A GPU runs behind its host, whose times do not show how long the GPU itself works.
        self._steps.append(StepTimes(data + max(0.0, step - waited) if self._on_cpu else data, data, data + step))

    def own_work(self) -> Work:
        """Return this rank's time per step since the last log line.

        Log intervals are pooled until they have `MIN_STEPS` steps. Only the last `MAX_STEPS` steps are used.
        """
        return Work.of(self._steps)

    def take(self, images: int, ranks: list[Work]) -> dict[str, float]:
        """Return the timings since the last log line, by metric; print a line if a straggler appears.

        The speed and the share of waiting for data are those of training: without the start of the run, evaluation,
        sample images and saving.
        """
        spent = self.stopwatch.take()
        if len(self._steps) >= MIN_STEPS:  # the same on every rank
            self._steps.clear()
        other = sum(spent.get(name, 0.0) for name in NOT_TRAINING)
        training = max(spent.pop("total") - other, 1e-9)
        seen, self._images_before = images - self._images_before, images
        loading = spent.get("data", 0.0)
        values = {
            "time/images_per_second": seen / training,
            "time/images_per_second_without_loading": seen / max(training - loading, 1e-9),
            "time/data_wait": loading / training,
            TRAINING_SECONDS: training,
            **{f"time/{name}_seconds": seconds for name, seconds in spent.items()},
            "epoch": images / self._epoch_images,
        }
        return values | (self._compare(ranks) if len(ranks) > 1 else {})

    def describe_shares(self) -> str:
        """Return a line with the shares of the time that were spent in steps, evaluation, samples and saving."""
        shares = with_other(with_whole_steps(self.stopwatch.shares()))
        named = {SECTION_NAMES.get(name, name): share for name, share in shares.items()}
        ordered = sorted(named.items(), key=lambda item: -item[1])
        together = sum(shares.get(name, 0.0) for name in NOT_TRAINING)
        listed = ", ".join(f"{share:.1%} {name}" for name, share in ordered)
        return f"time: {listed}; evaluation, sample images and saving together: {together:.1%}"

    def _compare(self, ranks: list[Work]) -> dict[str, float]:
        values = {f"{RANK_SECONDS}{rank}": one.work for rank, one in enumerate(ranks)}
        if not self._on_cpu:  # a rank's wait for data costs nothing while its GPU is busy with earlier steps
            return values
        line = self._stragglers.add(ranks)
        if line and self._world.is_first:
            print_line(line)
        found = self._stragglers.straggler
        rank, slowdown = (float(found.rank), found.slowdown) if found else (NO_STRAGGLER, 0.0)
        return values | {STRAGGLER_RANK: rank, STRAGGLER_SLOWDOWN: slowdown}
