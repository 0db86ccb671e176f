"""`--profile N`: trace N training steps, and say where their time went and what would make the run faster."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd.profiler import profile, record_function

from paceline.core.errors import DISK_FAILED
from paceline.core.text import print_line
from paceline.core.watch import beat
from paceline.parallel.torch_internals import group_store, start_trace
from paceline.parallel.world import World
from paceline.runs.profile_summary import (
    MAX_KERNELS,
    MAX_REMEDIES,
    PROFILE,
    SECTION_NAMES,
    SUMMARY_TEXT,
    KernelTime,
    ProfileSummary,
    Remedy,
    waiting_for,
)
from paceline.training import trace
from paceline.training.build import Parts
from paceline.training.compile import is_compiled
from paceline.training.graph import GraphedStep
from paceline.training.pace import Annotate, Stopwatch, with_other, with_whole_steps
from paceline.training.step import no_range
from paceline.training.trace import PHASE, SECTION, Collective, TraceTimes, compressed_path

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
MOST = 0.75  # a rank is slower than the others if at least this fraction of the waits for other ranks is for it
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

    precision: str
    captured: bool  # whether the step is a CUDA graph
    compiled: bool
    can_compile: bool
    loads_in_workers: bool  # whether worker processes load the data
    workers: int
    compresses: bool
    can_compress: bool  # whether processes exchange gradients


def remedies(
    times: TraceTimes, situation: Situation, run_shares: Mapping[str, float], waits: Mapping[int, float]
) -> tuple[Remedy, ...]:
    """Return the remedies with the largest estimated gains, largest first.

    `waits` are the seconds of waiting for each rank, from `waits_by_rank`. The communication in `times` excludes them.
    """
    found = [*_all(times, situation, run_shares, waits), *_slow_rank(waits, times)]
    found = [one for one in found if one.gain >= SMALLEST_GAIN]
    return tuple(sorted(found, key=lambda one: -one.gain)[:MAX_REMEDIES])


def _all(
    times: TraceTimes, situation: Situation, run_shares: Mapping[str, float], waits: Mapping[int, float]
) -> Iterator[Remedy]:
    total = max(times.total, 1e-9)
    waiting = times.sections.get("data", 0.0) / total
    yield _data(waiting, situation)
    gaps, exposed = times.gaps / total, times.exposed_communication / total
    if times.on_gpu and not situation.captured:
        action = "--graph auto, with a strategy and a machine that support CUDA graphs"
        yield Remedy(action, _percent("launch gaps", gaps), gaps)
    if times.on_gpu:
        yield from _arithmetic(times, situation, total)
    if situation.can_compress and not situation.compresses:
        reason = _percent("communication that delays the step", exposed)
        yield Remedy("--compress bf16", f"{reason}; bf16 halves the gradients, but rounds them", exposed / 2)
    fixed = {  # disjoint times that do not depend on the size of the batch
        "launch gaps" if times.on_gpu else "time between operators outside the optimizer": (
            # If rank 0 is slower than the others, the difference is not a fixed cost.
            max(0.0, times.gaps_outside_updates - waits.get(0, 0.0)) / total
        ),
        "communication that delays the step": exposed,
        "optimizer": times.updates / total,
    }
    reason = ", ".join(_percent(what, share) for what, share in fixed.items() if share >= SMALLEST_GAIN)
    action = "a batch twice as large (--batch-size, or --accumulate to save memory), with a new learning rate"
    yield Remedy(action, f"{reason}; half as many steps per epoch", min(1.0, sum(fixed.values())) / 2)
    for name, setting in (("evaluate", "evaluate_every"), ("sample", "sample_every"), ("save", "save_every")):
        share = run_shares.get(name, 0.0)
        reason = _percent(f"{SECTION_NAMES[name]}, share of the whole run:", share)
        yield Remedy(f"an interval twice as long (--set {setting}=…)", reason, share / 2)


def _slow_rank(waits: Mapping[int, float], times: TraceTimes) -> Iterator[Remedy]:
    slowest = max(waits, key=waits.__getitem__, default=-1)
    if slowest >= 0 and waits[slowest] >= MOST * sum(waits.values()):
        share = waits[slowest] / max(times.total, 1e-9)
        action = f"find out why rank {slowest} is slower than the other ranks: its trace is rank-{slowest}.json.gz"
        yield Remedy(action, _percent(waiting_for(slowest), share), share)


def _data(waiting: float, situation: Situation) -> Remedy:
    reason = _percent("waiting for data", waiting)
    if situation.loads_in_workers:
        action = f"more --workers (now {situation.workers}), --loader resident if the data fits, or `paceline pack`"
        return Remedy(action, reason, waiting)
    return Remedy("--loader workers, which prepares batches in other processes", reason, waiting / 2)


def _arithmetic(times: TraceTimes, situation: Situation, total: float) -> Iterator[Remedy]:
    elementwise = sum(
        seconds for name, (seconds, _) in times.kernels.items() if any(part in name.lower() for part in ELEMENTWISE)
    )
    busy = sum(seconds for seconds, _ in times.kernels.values()) - times.communication
    if not situation.compiled and situation.can_compile:
        kernels = _percent("elementwise, normalisation and reduction kernels", elementwise / total)
        reason = f"{kernels}; fusion is assumed to save half of it"
        yield Remedy("--compile on", reason, elementwise / 2 / total)
    if situation.precision in ("fp32", "tf32"):
        reason = f"{_percent('computation in ' + situation.precision, busy / total)}; bf16 halves the memory traffic"
        yield Remedy("--precision bf16", reason, busy / 2 / total)


def _percent(what: str, share: float) -> str:
    return f"{what} {share:.1%}"


KEY = "profile/"  # prefix of the keys in the process group's store
EXCHANGE_SECONDS = 60.0  # how long rank 0 waits for the collectives of the other ranks
POLL_SECONDS = 0.1


def publish(world: World, collectives: Sequence[Collective]) -> None:
    """Send the collectives in the trace of this rank to rank 0; empty if there is no trace.

    This uses the store of the process group, because a thread must not run collectives.
    """
    if world.size > 1 and not world.is_first:
        try:
            group_store().set(f"{KEY}{world.rank}", json.dumps(collectives))
        except dist.DistError:  # rank 0, which serves the store, has ended
            return


def receive(world: World) -> list[list[Collective]]:
    """Return the collectives that each rank except rank 0 has published; empty for ranks that have not."""
    until = time.monotonic() + EXCHANGE_SECONDS
    received = []
    for rank in range(1, world.size):
        text = _read(f"{KEY}{rank}", until)
        received.append([Collective(*one) for one in json.loads(text)])
    return received


def _read(key: str, until: float) -> str:
    try:
        store = group_store()
        while not store.check([key]):
            if time.monotonic() > until:
                return "[]"
            time.sleep(POLL_SECONDS)
        return bytes(store.get(key)).decode()
    except dist.DistError:
        return "[]"


def waits_by_rank(own: TraceTimes, others: Sequence[Sequence[Collective]]) -> dict[int, float]:
    """Return the seconds that rank 0 waits for each other rank, and in entry 0, that the others wait for rank 0.

    Only waits that delay a step are counted. `own` are the times of rank 0. Other ranks trace fewer steps, so their
    waits are extrapolated.
    """
    ranks = [_numbered(one) for one in (own.collectives, *others)]
    compared = set.intersection(*(set(one) for one in ranks))
    waits: dict[int, float] = defaultdict(float)
    for key in compared:
        found = [one[key] for one in ranks]
        shortest = min(one.seconds for one in found)
        last = next(rank for rank, one in enumerate(found) if one.seconds == shortest)
        waited = [min(one.seconds - shortest, one.exposed) for one in found]
        waits[last] += waited[0] if last else statistics.median(waited[1:])
    scale = own.num_collectives / max(len(compared), 1)
    return {rank: scale * seconds for rank, seconds in sorted(waits.items()) if seconds}


def _numbered(collectives: Sequence[Collective]) -> dict[tuple[str, int], Collective]:
    """Return collectives by name and occurrence: two that run at the same time may start in any order."""
    seen: Counter[str] = Counter()
    numbered = {}
    for one in collectives:
        numbered[one.name, seen[one.name]] = one
        seen[one.name] += 1
    return numbered


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
