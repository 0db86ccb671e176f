"""Read a Chrome trace that torch.profiler wrote: time by section, phase and kernel, gaps and communication.

As a program, this module writes the summary of a trace file and compresses the file. It does not import torch.
"""

from __future__ import annotations

import bisect
import gzip
import json
import math
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline.core.files import replacing
from paceline.runs.profile_summary import MAX_KERNELS, KernelTime, ProfileSummary, with_other, with_whole_steps

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
class Profiled:
    """What a trace does not contain: how many steps it covers, and where they ran."""

    device: str
    num_steps: int
    images_per_step: int
    note: str


def read_trace(trace: Mapping[str, Any], profiled: Profiled) -> ProfileSummary:
    """Return the summary of a trace. A section of the loop must have been recorded."""
    events = [_event(one) for one in trace["traceEvents"] if one.get("ph") == "X" and "dur" in one]
    sections = _by_name(events, SECTION)
    device = [one for one in events if one.kind in DEVICE_KINDS]
    start = min(begin for ranges in sections.values() for begin, _ in ranges)
    end = max([stop for ranges in sections.values() for _, stop in ranges] + [one.end for one in device])
    window, steps = [(start, end)], sections.get("step", [])
    if device:
        computed = merge((one.start, one.end) for one in device if "nccl" not in one.name.lower())
        communicated = merge((one.start, one.end) for one in device if "nccl" in one.name.lower())
        between = merge(one for name, ranges in sections.items() if name != "step" for one in ranges)
        idle = subtract(subtract(subtract(window, computed), communicated), subtract(between, steps))
        kernels, phases = _own_times(device, is_nested=False), _device_phases(events, device)
    else:
        operators = [one for one in events if one.kind == "cpu_op" and one.name.startswith(OPERATORS)]
        computed = merge((one.start, one.end) for one in operators)
        communicated = intersect(merge((one.start, one.end) for one in events if one.name.startswith("gloo:")), window)
        idle = subtract(subtract(steps, computed), communicated)
        kernels = _own_times([one for one in operators if _is_in(one, steps)])
        phases = {name: length(ranges) for name, ranges in _by_name(events, PHASE).items()}
    total = max(end - start, 1e-3)
    exposed = subtract(intersect(communicated, steps or window), computed)
    longest = sorted(kernels.items(), key=lambda item: -item[1][0])[:MAX_KERNELS]
    in_a_graph = ("the step is a CUDA graph, whose kernels a trace does not assign to phases",)
    return ProfileSummary(
        device=profiled.device,
        num_steps=profiled.num_steps,
        step_seconds=total * MICROSECOND / profiled.num_steps,
        images_per_second=profiled.num_steps * profiled.images_per_step / (total * MICROSECOND),
        sections=with_other(with_whole_steps({name: length(ranges) / total for name, ranges in sections.items()})),
        phases={name.replace("/", ": "): spent / total for name, spent in phases.items()},
        kernels=tuple(
            KernelTime(name[:120], spent / total, round(calls / profiled.num_steps, 2))
            for name, (spent, calls) in longest
        ),
        communication=length(communicated) / total,
        exposed_communication=length(exposed) / total,
        gaps=length(idle) / total,
        notes=(profiled.note, *(in_a_graph if device and not phases else ())),
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
    spent: dict[str, float] = defaultdict(float)
    for one in device:
        launched = launches.get(one.correlation, -math.inf)
        number = bisect.bisect_right(starts, launched) - 1
        if number >= 0 and launched <= ranges[number][1]:
            spent[ranges[number][2]] += one.end - one.start
    return dict(spent)


def _own_times(events: Iterable[Event], *, is_nested: bool = True) -> dict[str, tuple[float, int]]:
    """Return the time in each operator without the operators that it calls, and the number of calls."""
    found: dict[str, tuple[float, int]] = {}
    running: dict[Any, list[Event]] = defaultdict(list)  # by thread: the operators that call each other
    for one in sorted(events, key=lambda event: (event.start, -event.end)):
        callers = running[one.thread]
        while callers and callers[-1].end <= one.start:
            callers.pop()
        if callers and is_nested:
            spent, calls = found[callers[-1].name]
            found[callers[-1].name] = (spent - (one.end - one.start), calls)
        spent, calls = found.get(one.name, (0.0, 0))
        found[one.name] = (spent + one.end - one.start, calls + 1)
        callers.append(one)
    return found


def _is_in(event: Event, ranges: Intervals) -> bool:
    number = bisect.bisect_right(ranges, (event.start, math.inf)) - 1
    return number >= 0 and event.start < ranges[number][1]


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
    first = 0  # the first of the others that may cover a part of the rest
    for start, end in ranges:
        while first < len(others) and others[first][1] <= start:
            first += 1
        at, number = start, first
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
    """Return the total length of disjoint ranges."""
    return sum(end - start for start, end in ranges)


def _main(path: Path, profiled: Mapping[str, Any]) -> None:
    """Write the summary of a trace to its run, and replace the trace with a compressed one."""
    os.nice(10)  # training needs the processors more
    try:
        trace = json.loads(path.read_bytes())
    except (OSError, ValueError):  # torch reports no error if it cannot write
        sys.exit("torch did not write the whole trace; check the free space on the disk")
    if profiled:
        read_trace(trace, Profiled(**profiled)).write(path.parent.parent)
    with (
        path.open("rb") as plain,
        replacing(path.with_suffix(".json.gz"), durable=False) as partial,
        gzip.open(partial, "wb", compresslevel=1) as file,
    ):
        shutil.copyfileobj(plain, file)
    path.unlink()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), json.loads(sys.argv[2]))
