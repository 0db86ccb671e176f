"""Read a Chrome trace that torch.profiler wrote: time by section, phase and kernel, gaps and communication.

As a program, this module prints the times in a trace file as JSON and compresses the file. See `trace_process`.
"""

from __future__ import annotations

import bisect
import gzip
import json
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline.core.watch import die_with_parent

SECTION, PHASE = "paceline/section/", "paceline/phase/"  # prefixes of the ranges that the loop and the step open
DEVICE_KINDS = {"kernel", "gpu_memcpy", "gpu_memset"}
OPERATORS = ("aten::", "mkldnn::", "quantized::", "inductor::")  # others may wait for collectives that they call
MICROSECOND = 1e-6

Intervals = list[tuple[float, float]]  # sorted and disjoint


class Event(NamedTuple):
    """One range in a trace, in microseconds."""

    kind: str
    name: str
    thread: Any
    start: float
    end: float
    correlation: int | None  # connects a kernel with the call that launched it


@dataclass(frozen=True)
class TraceTimes:
    """Seconds spent in the profiled steps."""

    on_gpu: bool
    total: float
    sections: dict[str, float]
    phases: dict[str, float]
    kernels: dict[str, tuple[float, int]]  # seconds and calls, by name
    communication: float
    exposed_communication: float
    gaps: float

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> TraceTimes:
        """Return the times that `asdict` converted, after a round trip through JSON."""
        kernels = {name: (seconds, calls) for name, (seconds, calls) in content["kernels"].items()}
        return cls(**{**content, "kernels": kernels})


def read_trace(trace: Mapping[str, Any]) -> TraceTimes:
    """Return the times in a trace. A section of the loop must have been recorded."""
    events = [_event(one) for one in trace["traceEvents"] if one.get("ph") == "X" and "dur" in one]
    sections = _by_name(events, SECTION)
    device = [one for one in events if one.kind in DEVICE_KINDS]
    start = min(begin for ranges in sections.values() for begin, _ in ranges)
    end = max([stop for ranges in sections.values() for _, stop in ranges] + [one.end for one in device])
    window = [(start, end)]
    steps = sections.get("step", [])
    between = subtract(merge(one for name, ranges in sections.items() if name != "step" for one in ranges), steps)
    if device:
        computed = merge((one.start, one.end) for one in device if "nccl" not in one.name.lower())
        communicated = merge((one.start, one.end) for one in device if "nccl" in one.name.lower())
        idle = subtract(subtract(subtract(window, computed), communicated), between)
        kernels = _sums(device)
        phases = _device_phases(events, device)
    else:
        operators = [one for one in events if one.kind == "cpu_op" and one.name.startswith(OPERATORS)]
        computed = merge((one.start, one.end) for one in operators)
        sent = merge((one.start, one.end) for one in events if one.name.startswith("gloo:"))
        communicated = intersect(sent, window)
        idle = subtract(subtract(steps, computed), communicated)
        kernels = _own_times([one for one in operators if _is_in(one, steps)])
        phases = {name: length(ranges) for name, ranges in _by_name(events, PHASE).items()}
    exposed = subtract(intersect(communicated, steps or window), computed)
    return TraceTimes(
        on_gpu=bool(device),
        total=(end - start) * MICROSECOND,
        sections={name: length(ranges) for name, ranges in sections.items()},
        phases={name.replace("/", ": "): seconds for name, seconds in phases.items()},
        kernels=kernels,
        communication=length(communicated),
        exposed_communication=length(exposed),
        gaps=length(idle),
    )


def _event(one: Mapping[str, Any]) -> Event:
    start = float(one["ts"])
    correlation = one.get("args", {}).get("correlation")
    return Event(str(one.get("cat")), str(one["name"]), one.get("tid"), start, start + float(one["dur"]), correlation)


def _by_name(events: Iterable[Event], prefix: str) -> dict[str, Intervals]:
    """Return the ranges on the host whose names start with a prefix, by the rest of the name."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for one in events:
        if one.kind == "user_annotation" and one.name.startswith(prefix):
            found[one.name.removeprefix(prefix)].append((one.start, one.end))
    return {name: merge(ranges) for name, ranges in found.items()}


def _device_phases(events: Iterable[Event], device: Iterable[Event]) -> dict[str, float]:
    """Return the time that kernels took, by the phase that launched them.

    The backward pass launches kernels from another thread while the main thread waits in its range, so a launch
    belongs to the range that is open at its time. The kernels of a CUDA graph have no phase.
    """
    launches: dict[int | None, float] = {
        one.correlation: one.start for one in events if one.kind.startswith("cuda_") and one.correlation
    }
    ranges = sorted((start, end, name) for name, found in _by_name(events, PHASE).items() for start, end in found)
    starts = [start for start, _, _ in ranges]
    seconds: dict[str, float] = defaultdict(float)
    for one in device:
        launched = launches.get(one.correlation)
        place = bisect.bisect_right(starts, launched) - 1 if launched is not None else -1
        if place >= 0 and launched is not None and launched <= ranges[place][1]:
            seconds[ranges[place][2]] += (one.end - one.start) * MICROSECOND
    return dict(seconds)


def _sums(events: Iterable[Event]) -> dict[str, tuple[float, int]]:
    found: dict[str, tuple[float, int]] = {}
    for one in events:
        seconds, calls = found.get(one.name, (0.0, 0))
        found[one.name] = (seconds + (one.end - one.start) * MICROSECOND, calls + 1)
    return found


def _own_times(operators: Sequence[Event]) -> dict[str, tuple[float, int]]:
    """Return the time in each operator without the operators that it calls, and the number of calls."""
    found: dict[str, tuple[float, int]] = {}
    open_ones: dict[Any, list[Event]] = defaultdict(list)
    for one in sorted(operators, key=lambda event: (event.start, -event.end)):
        callers = open_ones[one.thread]
        while callers and callers[-1].end <= one.start:
            callers.pop()
        span = (one.end - one.start) * MICROSECOND
        if callers:
            seconds, calls = found[callers[-1].name]
            found[callers[-1].name] = (seconds - span, calls)
        seconds, calls = found.get(one.name, (0.0, 0))
        found[one.name] = (seconds + span, calls + 1)
        callers.append(one)
    return found


def _is_in(event: Event, ranges: Intervals) -> bool:
    place = bisect.bisect_right(ranges, (event.start, float("inf"))) - 1
    return place >= 0 and event.start < ranges[place][1]


def merge(ranges: Iterable[tuple[float, float]]) -> Intervals:
    """Return the union of ranges."""
    merged: Intervals = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def subtract(ranges: Intervals, others: Intervals) -> Intervals:
    """Return the parts of ranges that no other range covers."""
    left: Intervals = []
    place = 0
    for start, end in ranges:
        while place < len(others) and others[place][1] <= start:
            place += 1
        at, number = start, place
        while number < len(others) and others[number][0] < end:
            if others[number][0] > at:
                left.append((at, others[number][0]))
            at = max(at, others[number][1])
            number += 1
        if at < end:
            left.append((at, end))
    return left


def intersect(ranges: Intervals, others: Intervals) -> Intervals:
    """Return the parts of ranges that other ranges cover."""
    return subtract(ranges, subtract(ranges, others))


def length(ranges: Intervals) -> float:
    """Return the total length of disjoint ranges in seconds."""
    return sum(end - start for start, end in ranges) * MICROSECOND


def compressed_path(path: Path) -> Path:
    """Return the name of a compressed trace."""
    return path.with_suffix(".json.gz")


def _main(path: Path, parent: int) -> None:
    """Print the times in a trace file, then replace the file with a compressed one; end if the parent is killed."""
    die_with_parent(parent)
    os.nice(10)  # training needs the processors more
    print(json.dumps(asdict(read_trace(json.loads(path.read_bytes())))))
    partial = path.with_suffix(".json.gz.partial")
    with path.open("rb") as plain, gzip.open(partial, "wb", compresslevel=1) as file:
        shutil.copyfileobj(plain, file)
    partial.rename(compressed_path(path))
    path.unlink()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
