"""`--profile N`: trace N training steps, and say where their time went and what would make the run faster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.autograd.profiler import profile, record_function

from paceline.contracts.recipe import single_networks
from paceline.core.errors import DISK_FAILED
from paceline.core.text import print_line
from paceline.core.watch import beat
from paceline.parallel.torch_internals import start_trace
from paceline.runs.profile_summary import (
    MAX_KERNELS,
    PROFILE,
    SUMMARY_TEXT,
    KernelTime,
    ProfileSummary,
    Remedy,
)
from paceline.training import trace
from paceline.training.build import Parts
from paceline.training.compile import is_compiled
from paceline.training.graph import GraphedStep
from paceline.training.pace import Annotate, Stopwatch, with_other, with_whole_steps
from paceline.training.step import no_range
from paceline.training.trace import PHASE, SECTION, TraceTimes, compressed_path

LEFTOVERS = ("rank-*.tmp", "rank-*.partial")  # unfinished files of torch, and of this module and `trace`
PROBE_BYTES = 2**16


class TraceError(Exception):
    """Raised if a trace cannot be written, summarised or compressed."""


def write_trace(tracing: profile, path: Path) -> None:
    """Write a trace to a file, and free its memory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # from an earlier command
    try:
        tracing.export_chrome_trace(str(path))
    except RuntimeError as error:
        raise TraceError(str(error)) from error
    finally:
        tracing.kineto_results = None
    if not path.exists():  # torch raises no error if it cannot write
        raise TraceError("torch could not write the trace")


def summarise_trace(path: Path) -> TraceTimes:
    """Return the times in a trace file, and replace the file with a compressed one; wait until this is done."""
    # With -P, modules in the current folder do not shadow others. The module does not import torch.
    command = [sys.executable, "-P", "-m", trace.__name__, str(path), str(os.getpid())]
    finished = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if finished.returncode:
        last = (finished.stderr.splitlines() or [f"exit code {finished.returncode}"])[-1]
        raise TraceError(last)
    return TraceTimes.from_json(json.loads(finished.stdout))


def clean_up(path: Path) -> str:
    """Remove the unfinished files of a trace that failed; return why the disk is full, empty if it is not.

    If the disk is full, the trace itself is also removed, because checkpoints need the space.
    """
    reason = ""
    probe = path.with_suffix(".json.partial")
    try:  # while the unfinished files still fill the disk
        probe.write_bytes(bytes(PROBE_BYTES))
    except OSError as error:
        reason = str(error.strerror) if error.errno in DISK_FAILED else ""
    if reason:
        path.unlink(missing_ok=True)
    remove_unfinished(path.parent, f"{path.stem}.*")
    return reason


def remove_unfinished(folder: Path, names: str = "*") -> None:
    """Remove files of traces that were not finished, such as those of a killed process."""
    for pattern in LEFTOVERS:
        for leftover in folder.glob(pattern):
            if leftover.match(names):
                with suppress(OSError):
                    leftover.unlink()


def remove_traces_of_other_ranks(folder: Path, num_ranks: int) -> None:
    """Remove traces of ranks that this run does not have, which an earlier profile with more ranks left."""
    for file in folder.glob("rank-*.json.gz"):
        rank = file.name.removeprefix("rank-").removesuffix(".json.gz")
        if rank.isdecimal() and int(rank) >= num_ranks:
            with suppress(OSError):
                file.unlink()


SMALLEST_GAIN = 0.01
# Parts of the names of kernels that only move memory; torch.compile fuses them into fewer kernels.
ELEMENTWISE = (
    "elementwise",
    "vectorized",
    "batch_norm",
    "bn_",
    "batchnorm",
    "reduce",
    "copy",
    "foreach",
    "multi_tensor",
)


@dataclass(frozen=True)
class Situation:
    """The choices of a run that decide which remedies apply."""

    captured: bool  # whether the step is a CUDA graph
    can_gain_by_compiling: bool
    loads_in_workers: bool  # whether worker processes load the data
    workers: int


def remedies(times: TraceTimes, situation: Situation) -> tuple[Remedy, ...]:
    """Return the remedies that save at least 1 % of the time by estimate, the largest gain first."""
    found = [one for one in _remedies(times, situation) if one.gain >= SMALLEST_GAIN]
    return tuple(sorted(found, key=lambda one: -one.gain))


def _remedies(times: TraceTimes, situation: Situation) -> Iterator[Remedy]:
    total = max(times.total, 1e-9)
    waiting, gaps = times.sections.get("data", 0.0) / total, times.gaps / total
    reason = f"waiting for data {waiting:.1%}"
    if situation.loads_in_workers:
        action = f"more --workers (now {situation.workers}), --loader resident if the data fits, or `paceline pack`"
        yield Remedy(action, reason, waiting)
    else:
        yield Remedy("--loader workers, which prepares batches in other processes", reason, waiting / 2)
    if times.on_gpu and not situation.captured:
        action = "--graph auto, with a strategy and a machine that support CUDA graphs"
        yield Remedy(action, f"launch gaps {gaps:.1%}", gaps)
    if times.on_gpu and situation.can_gain_by_compiling:
        seconds = [
            taken for name, (taken, _) in times.kernels.items() if any(one in name.lower() for one in ELEMENTWISE)
        ]
        share = sum(seconds) / total
        kernels = f"elementwise, normalisation and reduction kernels {share:.1%}"
        yield Remedy("--compile on", f"{kernels}; fusion is assumed to save half of it", share / 2)


WARMUP_STEPS = 5  # steps before the trace; a CUDA graph must also have been captured
STEPS_OF_OTHER_RANKS = 10  # enough to compare their traces with that of rank 0
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
        """Wait until all ranks have compressed their traces."""
        self.write_trace()
        while self._is_any_rank_reading():
            if self._reader:
                self._reader.join(BEAT_SECONDS)
            beat()

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
        try:
            began = time.perf_counter()
            write_trace(tracing, path)
            seconds = self._seconds + time.perf_counter() - began
            times = summarise_trace(path)
            if not world.is_first:
                return
            remove_traces_of_other_ranks(path.parent, world.size)
            summary = self._summary(times, seconds)
            summary.write(self._run)
        except (TraceError, OSError) as error:
            full = clean_up(path)
            problem = f"could not be written: {full}" if full else f"could not be summarised: {error}"
            print_line(f"profile: the trace {path} {problem}")
            return
        best = f": {summary.remedies[0].action}" if summary.remedies else ""
        files = f"{path.with_name(SUMMARY_TEXT)} and {compressed_path(path)}"
        print_line(f"profile of {self._traced} step{'s' * (self._traced > 1)}: {files}{best}")

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._parts.world.device)

    def _summary(self, times: TraceTimes, seconds: float) -> ProfileSummary:
        """Return the summary; ending and writing the trace took `seconds`, in which the GPU may have trained."""
        parts, steps = self._parts, self._traced
        total = max(times.total, 1e-9)
        kernels = sorted(times.kernels.items(), key=lambda item: -item[1][0])[:MAX_KERNELS]
        device = parts.world.device
        notes = [f"ending and writing the trace took at most {seconds:.2f} s of training time"]
        if times.on_gpu and not times.phases:
            notes.append("the step is a CUDA graph, whose kernels a trace does not assign to phases")
        return ProfileSummary(
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            num_steps=steps,
            step_seconds=total / steps,
            images_per_second=steps * parts.feed.images_per_step / total,
            sections=with_other({name: one / total for name, one in with_whole_steps(times.sections).items()}),
            phases={name: seconds / total for name, seconds in times.phases.items()},
            kernels=tuple(
                KernelTime(name[:120], seconds / total, round(calls / steps, 2)) for name, (seconds, calls) in kernels
            ),
            communication=times.communication / total,
            exposed_communication=times.exposed_communication / total,
            gaps=times.gaps / total,
            remedies=remedies(times, situation_of(parts)),
            notes=tuple(notes),
        )


def _annotate(prefix: str) -> Annotate:
    def open_range(name: str) -> AbstractContextManager[object]:
        opened: AbstractContextManager[object] = record_function(prefix + name)
        return opened

    return open_range


def situation_of(parts: Parts) -> Situation:
    """Return the choices of a run that decide which remedies apply."""
    networks, strategy = single_networks(parts.recipe).values(), parts.strategy
    return Situation(
        captured=isinstance(parts.run_step, GraphedStep) and not parts.run_step.failed,
        can_gain_by_compiling=not (
            any(map(is_compiled, networks)) or strategy.why_not("compile") or strategy.recomputes
        ),
        loads_in_workers=parts.loaders["train"].uses_workers,
        workers=parts.config.run.workers,
    )
