"""What would make a run faster: remedies with gains estimated from the shares in a profile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from paceline.runs.profile_summary import MAX_REMEDIES, SECTION_NAMES, Remedy, waiting_for
from paceline.training.trace import TraceTimes

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
