"""Find the rank that did not arrive, by comparing the collective operations that the ranks have started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.core.flight_recorder import INCOMPLETE, Operation, Record


@dataclass(frozen=True)
class Witness:
    """What is known about one rank when a run hangs."""

    record: Record
    condition: str = ""  # such as "is stopped"; empty if the rank runs

    @property
    def rank(self) -> int:
        return self.record.rank


@dataclass(frozen=True)
class Diagnosis:
    """The ranks that cause a hang, and one line for the user."""

    ranks: tuple[int, ...]
    message: str


def diagnose(witnesses: Sequence[Witness]) -> Diagnosis | None:
    """Return which ranks did not arrive at a collective operation; None if the records do not show it."""
    halted = [one for one in witnesses if one.condition]
    if halted:
        first = halted[0]
        return Diagnosis(
            tuple(one.rank for one in halted),
            f"{_ranks(halted)} did not arrive: rank {first.rank} {first.condition}"
            f"{_after(first.record.last) if first.record.last else ''}",
        )
    if len(witnesses) < 2:
        return None
    return deviation(witnesses) or _latecomers(witnesses)


def deviation(witnesses: Sequence[Witness]) -> Diagnosis | None:
    """Return the ranks whose operations differ from those of the others; None if all ran the same ones so far."""
    by_rank = {one.rank: {found.number: found for found in one.record.operations} for one in witnesses}
    if len(by_rank) < 2:
        return None
    common = set.intersection(*(set(operations) for operations in by_rank.values()))
    for number in sorted(common):
        groups: dict[tuple[int, str], list[int]] = {}
        for rank, operations in by_rank.items():
            groups.setdefault((operations[number].step, operations[number].name), []).append(rank)
        if len(groups) > 1:
            odd = _odd_one(number, groups, by_rank)
            other = next(rank for rank in by_rank if rank not in odd)
            skipped, found = by_rank[other][number], by_rank[odd[0]][number]
            named = f"rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd[:8]))}"
            unused = found.name.partition(INCOMPLETE)[2]
            if unused and INCOMPLETE not in skipped.name:
                return Diagnosis(
                    tuple(odd),
                    f"{named} did not arrive at {skipped}: the loss on rank {odd[0]} did not use {unused}; "
                    "on all ranks, the loss must use every parameter of the network in every step",
                )
            return Diagnosis(
                tuple(odd),
                f"{named} did not arrive at {skipped}, but started {found} instead: all ranks must run the "
                "same collective operations in the same order",
            )
    return None


def _odd_one(
    number: int, groups: Mapping[tuple[int, str], list[int]], by_rank: Mapping[int, Mapping[int, Operation]]
) -> list[int]:
    """Return the ranks that caused a difference between the sequences of operations.

    These are ranks that did not exchange all gradients. If there are none, it is the smaller group of ranks with the
    same operation or, of two equal groups, the one that has started more operations.
    """
    incomplete = [rank for (_, name), ranks in groups.items() if INCOMPLETE in name for rank in ranks]
    if 0 < len(incomplete) < len(by_rank):
        return incomplete
    sizes = sorted(len(ranks) for ranks in groups.values())
    if len(groups) > 2 or sizes[0] < sizes[1]:
        return min(groups.values(), key=len)
    (one, first), (other, second) = groups.items()
    usual = [_is_usual(by_rank[ranks[0]], number) for ranks in (first, second)]
    if usual[0] != usual[1]:
        return second if usual[0] else first
    # Otherwise the rank that is further ahead has skipped an operation.
    return second if other[0] >= one[0] else first


def _is_usual(operations: Mapping[int, Operation], number: int) -> bool:
    """Return whether an earlier step began with the same operations as this step, up to operation `number`."""
    steps: dict[int, list[str]] = {}
    for at, operation in sorted(operations.items()):
        if at <= number:
            steps.setdefault(operation.step, []).append(operation.name)
    current = steps.pop(operations[number].step)
    return any(names[: len(current)] == current for names in steps.values())


def _latecomers(witnesses: Sequence[Witness]) -> Diagnosis | None:
    counts = {one.rank: one.record.last.number if one.record.last else 0 for one in witnesses}
    most = max(counts.values())
    late = [one for one in witnesses if counts[one.rank] < most]
    if not late:
        return None
    waiting = next(one for one in witnesses if counts[one.rank] == most)
    first = late[0]
    return Diagnosis(
        tuple(one.rank for one in late),
        f"{_ranks(late)} did not arrive at {waiting.record.last}; rank {first.rank} is still busy"
        f"{_after(first.record.last)}",
    )


def _ranks(witnesses: Sequence[Witness]) -> str:
    numbers = [str(one.rank) for one in witnesses]
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(numbers[:8])}{', …' * (len(numbers) > 8)}"


def _after(operation: Operation | None) -> str:
    return f" after {operation}" if operation else " before its first collective operation"
