"""`--profile N`: trace N training steps after the warm-up, and summarise where their time went.

Each rank writes a Chrome trace, which Perfetto also opens. Rank 0 traces all N steps, and the others only a few.
Training continues while a trace is summarised and compressed. While torch writes a trace, it holds the GIL, so the
loop cannot queue work for the GPU. On a single GPU, the trace is therefore written when many steps are queued.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.autograd.profiler import profile, record_function

from paceline.core.heartbeat import beat
from paceline.core.printable import print_line
from paceline.parallel.torch_internals import start_trace
from paceline.runs.profile_summary import MAX_KERNELS, PROFILE, SUMMARY_TEXT, KernelTime, ProfileSummary, waiting_for
from paceline.training.build import Parts
from paceline.training.compile import is_compiled
from paceline.training.graph import GraphedStep
from paceline.training.rank_waits import publish, receive, waits_by_rank
from paceline.training.remedies import Situation, remedies
from paceline.training.step import no_range
from paceline.training.stopwatch import Annotate, Stopwatch, with_other, with_whole_steps
from paceline.training.trace import PHASE, SECTION, Collective, TraceTimes, compressed_path
from paceline.training.trace_process import (
    TraceError,
    clean_up,
    remove_traces_of_other_ranks,
    remove_unfinished,
    summarise_trace,
    write_trace,
)

WARMUP_STEPS = 5  # steps before the trace; a CUDA graph must also have been captured
STEPS_OF_OTHER_RANKS = 10  # enough to see which rank the others wait for
MAX_STEPS_UNTIL_WRITTEN = 200  # a trace is written after so many steps, even if the loop has not logged its losses
BEAT_SECONDS = 0.5  # time between progress reports while the end of the run waits for the summary


class StepProfiler:
    """Traces some steps of a loop. The loop calls `before_step` and `after_step`, and `finish` at its end."""

    def __init__(self, parts: Parts, stopwatch: Stopwatch, run: Path, images: int) -> None:
        """Prepare to trace; `images` is the number of images seen when the loop starts."""
        self._parts, self._stopwatch, self._run = parts, stopwatch, run
        wanted = parts.config.run.profile
        left = (parts.total_images - images) // parts.feed.images_per_step
        self._on_gpu = parts.world.device.type == "cuda"
        # With several ranks, all must log at the same step, but their traces end at different steps.
        self._may_delay_log = self._on_gpu and parts.world.size == 1
        self._num_steps = min(wanted if parts.world.is_first else min(wanted, STEPS_OF_OTHER_RANKS), left)
        self._latest_start = max(0, left - wanted)
        self._steps = self._traced = self._stopped_at = 0
        self._profile: profile | None = None
        self._unwritten: profile | None = None  # the trace, between its end and the start of the reader
        self._reader: threading.Thread | None = None  # writes and summarises the trace
        self._made: _Made | None = None
        self._seconds = 0.0  # of training time, for ending the trace

    @classmethod
    def of(cls, parts: Parts, stopwatch: Stopwatch, run: Path, images: int) -> StepProfiler | None:
        """Return a profiler; None if `--profile` is 0 or no steps are left.

        Unfinished files from a run that was killed while it wrote a trace are removed.
        """
        world, wanted = parts.world, parts.config.run.profile
        if world.place.local_rank == 0:  # no rank traces until all ranks train
            remove_unfinished(run / PROFILE)
        if images + parts.feed.images_per_step <= parts.total_images:
            return cls(parts, stopwatch, run, images) if wanted else None
        if wanted and world.is_first:
            print_line(f"--profile {wanted}: no steps are left to profile")
        return None

    def before_step(self) -> None:
        """Start the trace if this is the first step to trace."""
        if self._profile or self._traced or not self._num_steps:
            return
        if (self._steps >= WARMUP_STEPS and self._is_warm()) or self._steps >= self._latest_start:
            self._start()

    @property
    def delays_log(self) -> bool:
        """Whether the loop should postpone its log, so that more steps are queued for the GPU."""
        return self._may_delay_log and self._unwritten is not None

    def after_step(self) -> None:
        """Count the step, and end the trace after the last step to trace."""
        self._steps += 1
        if self._profile:
            self._traced += 1
            if self._traced == self._num_steps:
                self._stop(self._profile)
        if not self.delays_log or self._steps - self._stopped_at >= MAX_STEPS_UNTIL_WRITTEN:
            self.write_trace()

    def finish(self) -> None:
        """Wait until all ranks have compressed their traces, and add the shares of the whole run to the summary."""
        self.write_trace()
        while self._is_any_rank_reading():
            if self._reader:
                self._reader.join(BEAT_SECONDS)
            beat()
        if self._made:
            shares = with_other(with_whole_steps(self._stopwatch.shares()))
            try:
                self._summary(self._made, shares).write(self._run)
            except OSError as error:
                print_line(f"profile: the summary in {self._run / PROFILE} could not be completed: {error}")

    def _is_any_rank_reading(self) -> bool:
        own = float(self._reader is not None and self._reader.is_alive())
        world = self._parts.world
        return bool(world.sum(torch.tensor([own], device=world.device)).item())

    def _is_warm(self) -> bool:
        step = self._parts.run_step
        return not isinstance(step, GraphedStep) or step.is_settled

    def _start(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # kineto prints internal events otherwise
        self._synchronize()
        self._stopwatch.annotate = _annotate(SECTION)
        self._parts.step.annotate = _annotate(PHASE)
        self._profile = start_trace(self._parts.world.device)

    def _stop(self, tracing: profile) -> None:
        self._synchronize()
        began = time.perf_counter()
        beat()
        tracing.__exit__(None, None, None)
        self._seconds = time.perf_counter() - began
        self._stopwatch.annotate = None
        self._parts.step.annotate = no_range
        self._profile, self._unwritten, self._stopped_at = None, tracing, self._steps

    def write_trace(self) -> None:
        """Write and summarise the trace in a thread, if there is one that is not yet written."""
        if self._unwritten:
            beat()
            tracing, self._unwritten = self._unwritten, None
            self._reader = threading.Thread(target=self._read, args=[tracing], daemon=True)
            self._reader.start()

    def _read(self, tracing: profile) -> None:
        """Write, summarise and compress a trace; rank 0 writes the summary."""
        world = self._parts.world
        path = self._run / PROFILE / f"rank-{world.rank}.json"
        collectives: Sequence[Collective] = ()
        try:
            began = time.perf_counter()
            write_trace(tracing, path)
            seconds = self._seconds + time.perf_counter() - began
            times = summarise_trace(path)
            collectives = times.collectives
            if not world.is_first:
                return
            remove_traces_of_other_ranks(path.parent, world.size)
            self._made = _Made.of(times, receive(world), self._traced, seconds)
            summary = self._summary(self._made, {})
            summary.write(self._run)
        except (TraceError, OSError) as error:
            full = clean_up(path)
            problem = f"could not be written: {full}" if full else f"could not be summarised: {error}"
            print_line(f"profile: the trace {path} {problem}")
            return
        finally:
            publish(world, collectives)
        best = f": {summary.remedies[0].action}" if summary.remedies else ""
        files = f"{path.with_name(SUMMARY_TEXT)} and {compressed_path(path)}"
        print_line(f"profile of {self._traced} step{'s' * (self._traced > 1)}: {files}{best}")

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._parts.world.device)

    def _summary(self, made: _Made, run_shares: dict[str, float]) -> ProfileSummary:
        parts, times = self._parts, made.times
        total = max(times.total, 1e-9)
        kernels = sorted(times.kernels.items(), key=lambda item: -item[1][0])[:MAX_KERNELS]
        device = parts.world.device
        notes = [f"ending and writing the trace took at most {made.seconds:.2f} s of training time"]
        if not made.is_compared:
            notes.append("the ranks' traces could not be compared: communication includes waiting for slower ranks")
        if times.on_gpu and not times.phases:
            notes.append("the step is a CUDA graph, whose kernels a trace does not assign to phases")
        return ProfileSummary(
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            num_steps=made.num_steps,
            step_seconds=total / made.num_steps,
            images_per_second=made.num_steps * parts.feed.images_per_step / total,
            sections=with_other({name: one / total for name, one in with_whole_steps(times.sections).items()}),
            phases={name: seconds / total for name, seconds in times.phases.items()},
            kernels=tuple(
                KernelTime(name[:120], seconds / total, round(calls / made.num_steps, 2))
                for name, (seconds, calls) in kernels
            ),
            communication=times.communication / total,
            exposed_communication=times.exposed_communication / total,
            gaps=times.gaps / total,
            remedies=remedies(times, situation_of(parts), run_shares, made.waits),
            run_shares=run_shares,
            notes=tuple(notes),
            waits={waiting_for(rank): seconds / total for rank, seconds in made.waits.items()},
        )


def _annotate(prefix: str) -> Annotate:
    def open_range(name: str) -> AbstractContextManager[object]:
        opened: AbstractContextManager[object] = record_function(prefix + name)
        return opened

    return open_range


@dataclass(frozen=True)
class _Made:
    """A trace of rank 0 that has been summarised."""

    times: TraceTimes  # waiting for slower ranks is not part of the communication
    waits: dict[int, float]  # see `waits_by_rank`
    is_compared: bool  # whether the traces of all ranks were compared
    num_steps: int
    seconds: float  # for ending and writing the trace; the GPU may have trained meanwhile

    @classmethod
    def of(cls, times: TraceTimes, others: Sequence[Sequence[Collective]], num_steps: int, seconds: float) -> _Made:
        """Separate waiting from communication, given the collectives in the traces of the other ranks."""
        if not others or not times.collectives:
            return cls(times, {}, True, num_steps, seconds)
        if not all(others):
            return cls(times, {}, False, num_steps, seconds)
        waits = waits_by_rank(times, others)
        waited = min(times.exposed_communication, sum(one for rank, one in waits.items() if rank))
        times = replace(
            times,
            communication=times.communication - waited,
            exposed_communication=times.exposed_communication - waited,
        )
        return cls(times, waits, True, num_steps, seconds)


def situation_of(parts: Parts) -> Situation:
    """Return the choices of a run that decide which remedies apply."""
    run, strategy = parts.config.run, parts.strategy
    loader = parts.loaders["train"]
    return Situation(
        precision=parts.precision.name,
        captured=isinstance(parts.run_step, GraphedStep) and not parts.run_step.failed,
        compiled=any(is_compiled(network) for network in parts.recipe.single_networks.values()),
        can_compile=not strategy.cannot_compile and not strategy.recomputes,
        loads_in_workers=loader.uses_workers,
        workers=run.workers,
        compresses=run.compress != "none",
        can_compress=strategy.needs_processes and parts.world.size > 1,
    )
