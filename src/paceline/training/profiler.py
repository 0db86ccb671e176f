"""`--profile N`: trace N training steps, and report where their time went."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from pathlib import Path

import torch
from torch.autograd.profiler import profile, record_function

from paceline.core.text import print_line
from paceline.core.watch import beat
from paceline.parallel.torch_internals import start_trace
from paceline.runs.profile_summary import PROFILE, SUMMARY_TEXT
from paceline.training import trace
from paceline.training.build import Parts
from paceline.training.graph import GraphedStep
from paceline.training.log import Annotate, Stopwatch
from paceline.training.step import no_range
from paceline.training.trace import PHASE, SECTION, Profiled

WARMUP_STEPS = 5  # steps before the trace; a CUDA graph must also have been captured
STEPS_OF_OTHER_RANKS = 10  # enough to compare their traces with that of rank 0
BEAT_SECONDS = 0.5  # time between progress reports while the end of the run waits for the summary


class StepProfiler:
    """Traces some steps of a loop. The loop calls `before_step` and `after_step`, and `finish` at its end."""

    def __init__(self, parts: Parts, stopwatch: Stopwatch, run: Path, images: int) -> None:
        """Prepare to trace; `images` is the number of images seen when the loop starts."""
        self._parts, self._stopwatch = parts, stopwatch
        self._path = run / PROFILE / f"rank-{parts.world.rank}.json"
        wanted = parts.config.run.profile
        left = (parts.total_images - images) // parts.feed.images_per_step
        self._num_steps = min(wanted if parts.world.is_first else min(wanted, STEPS_OF_OTHER_RANKS), left)
        self._latest_start = max(0, left - wanted)
        self._steps = self._traced = 0
        self._profile: profile | None = None
        self._summary: subprocess.Popen[str] | None = None  # the process that summarises and compresses the trace

    def before_step(self) -> None:
        """Start the trace if this is the first step to trace."""
        if self._profile or self._traced or not self._num_steps:
            return
        step = self._parts.run_step
        is_warm = self._steps >= WARMUP_STEPS and (not isinstance(step, GraphedStep) or step.is_settled)
        if is_warm or self._steps >= self._latest_start:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # kineto prints internal events otherwise
            self._synchronize()
            self._stopwatch.annotate, self._parts.step.annotate = _annotate(SECTION), _annotate(PHASE)
            self._profile = start_trace(self._parts.world.device)

    def after_step(self) -> None:
        """Count the step, and end the trace after the last step to trace."""
        self._steps += 1
        if self._profile:
            self._traced += 1
            if self._traced == self._num_steps:
                self._stop(self._profile)

    def finish(self) -> None:
        """Wait until all ranks have compressed their traces; print where they are, or why one could not be written."""
        while self._is_any_rank_reading():
            if self._summary:
                with suppress(subprocess.TimeoutExpired):
                    self._summary.wait(BEAT_SECONDS)
            beat()
        if not self._summary:
            return
        assert self._summary.stderr
        errors = self._summary.stderr.read().splitlines()
        if self._summary.returncode:
            self._fail((errors or [f"exit code {self._summary.returncode}"])[-1])
        elif self._parts.world.is_first:
            files = f"{self._path.with_name(SUMMARY_TEXT)} and {self._path.with_suffix('.json.gz')}"
            print_line(f"profile of {self._traced} step{'s' * (self._traced > 1)}: {files}")

    def _is_any_rank_reading(self) -> bool:
        own, world = float(self._summary is not None and self._summary.poll() is None), self._parts.world
        return bool(world.sum(torch.tensor([own], device=world.device)).item())

    def _stop(self, tracing: profile) -> None:
        """End the trace, write it, and start the process that summarises it while training continues."""
        self._synchronize()
        began = time.perf_counter()
        beat()
        tracing.__exit__(None, None, None)
        self._stopwatch.annotate, self._parts.step.annotate, self._profile = None, no_range, None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.unlink(missing_ok=True)  # from an earlier command
            tracing.export_chrome_trace(str(self._path))
            tracing.kineto_results = None  # frees its memory
            note = f"ending and writing the trace took {time.perf_counter() - began:.2f} s of training time"
            # With -P, modules in the current folder do not shadow others. The module does not import torch.
            command = [sys.executable, "-P", "-m", trace.__name__, str(self._path), self._describe(note)]
            self._summary = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        except (OSError, RuntimeError) as error:
            self._fail(str(error))

    def _describe(self, note: str) -> str:
        """Return what the summary adds to the trace, as JSON; null if this rank writes no summary."""
        parts = self._parts
        if not parts.world.is_first:
            return "null"
        device = torch.cuda.get_device_name(parts.world.device) if parts.world.device.type == "cuda" else "CPU"
        return json.dumps(asdict(Profiled(device, self._traced, parts.feed.images_per_step, note)))

    def _fail(self, reason: str) -> None:
        """Report that the trace could not be written, and remove it, because checkpoints may need the space."""
        for leftover in self._path.parent.glob(f"{self._path.name}*"):
            leftover.unlink(missing_ok=True)
        print_line(f"profile: the trace {self._path} could not be written: {' '.join(reason.split())}")

    def _synchronize(self) -> None:
        if self._parts.world.device.type == "cuda":
            torch.cuda.synchronize(self._parts.world.device)


def _annotate(prefix: str) -> Annotate:
    def open_range(name: str) -> AbstractContextManager[object]:
        opened: AbstractContextManager[object] = record_function(prefix + name)
        return opened

    return open_range
