"""The phases' losses and signals, kept on the device until they are logged.

One row per micro-batch is written without waiting for the device. Rows from all ranks are read when logging and
before every save. Reading also finds the first value that is not finite, with its step and phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.contracts.recipe import Loss, Recipe
from paceline.core.errors import UserError
from paceline.parallel.world import World
from paceline.runs.tensor_files import HostCopy

VALUES = "values"
SPREAD = "spread/"
DIVERGED_ABOVE = 1e8  # the run stops if the magnitude of a loss or signal exceeds this
CAPACITY = 1024  # rows per page; when a page is full, its rows are added to running sums on the device


class NotFinite(NamedTuple):
    """The first value that was not finite."""

    images: int
    phase: str
    name: str


class Reading(NamedTuple):
    """Mean losses and signals since the last reading."""

    values: dict[str, float]  # means over all samples on all ranks; `spread/NAME`: max minus min across ranks
    not_finite: NotFinite | None
    largest: dict[str, float]  # the largest magnitudes on any rank
    constant: frozenset[str]  # values that were zero on all ranks in the last step that computed them
    ranks: list[list[float]]  # the numbers that each rank passed to `request`

    def problem(self, recipe: Recipe, images: int) -> tuple[str, int] | None:
        """Return what is wrong, and after how many images; None if the run is healthy.

        A value is not finite, the run has diverged, or a network has collapsed. `images` have been seen so far.
        """
        if self.not_finite:
            return (
                f"loss {self.not_finite.name!r} in phase {self.not_finite.phase!r} is not finite",
                self.not_finite.images,
            )
        for name, value in self.largest.items():
            if value > DIVERGED_ABOVE:
                return f"the run has diverged (the magnitude of {name} is {value:.3g})", images
        collapsed = next((name for name in recipe.must_vary if self.largest.get(name) == 0), "")
        return (collapse(collapsed), images) if collapsed else None

    def suspect(self, recipe: Recipe) -> str:
        """Return the name of a value that must vary but was zero in the last step; "" if there is none.

        A network may have collapsed during the last log interval, so its weights must not be saved.
        """
        return next((name for name in recipe.must_vary if name in self.constant), "")


def collapse(name: str) -> str:
    """Describe the collapse of a network whose loss term or signal `name` is zero."""
    return f"a network's output has become constant ({name} is 0)"


class Entry(NamedTuple):
    """The losses and signals of one phase for one micro-batch, on the device."""

    phase: str
    names: tuple[str, ...]
    values: Tensor  # one value per name
    samples: int

    @classmethod
    def of(cls, phase: str, loss: Loss, samples: int) -> Entry:
        """Return the entry for a phase's loss."""
        values = {**loss.terms, **loss.signals}
        if len(values) < len(loss.terms) + len(loss.signals):
            raise UserError(
                f"phase {phase!r} uses the same name for a loss term and a signal "
                f"({', '.join(loss.terms & loss.signals.keys())}); rename one of them"
            )
        numbers = [value.detach() for value in values.values()]
        column = numbers[0].unsqueeze(0) if len(numbers) == 1 else torch.stack(numbers)
        return cls(phase, tuple(values), column, samples)


class _Page:
    """The logged rows of one phase."""

    def __init__(self, names: tuple[str, ...], device: torch.device) -> None:
        self.names = names
        self.rows = torch.zeros(CAPACITY, len(names), device=device, dtype=torch.float64)
        self.slots = self.rows.unbind()  # row views, created once because every step writes to one
        self.sums = torch.zeros(len(names) + 1, device=device, dtype=torch.float64)  # last element: total weight
        self.first_bad = torch.full((len(names),), float("inf"), device=device, dtype=torch.float64)
        self.largest = torch.zeros(len(names), device=device, dtype=torch.float64)
        self.varied_at = torch.full((len(names),), -float("inf"), device=device, dtype=torch.float64)
        self.at: list[tuple[int, int]] = []  # (images seen, samples) for each row
        self.last_at = 0  # images seen at the last row, also after it was added to the sums

    def fold(self) -> None:
        """Add the rows to the sums, on the device."""
        if not self.at:
            return
        rows = self.rows[: len(self.at)]
        images, weights = _upload(self.at, rows.device).unbind(1)
        bad = torch.where(rows.isfinite(), torch.inf, images.unsqueeze(1))
        self.first_bad = torch.minimum(self.first_bad, bad.amin(0))
        self.largest = torch.maximum(self.largest, rows.abs().amax(0))
        varied = torch.where(rows == 0, -torch.inf, images.unsqueeze(1))
        self.varied_at = torch.maximum(self.varied_at, varied.amax(0))
        self.sums += torch.cat([(rows * weights.unsqueeze(1)).sum(0), weights.sum().reshape(1)])
        self.last_at = self.at[-1][0]
        self.at.clear()


def _upload(numbers: list[Any], device: torch.device) -> Tensor:
    """Copy numbers to a device. Pinned memory makes this asynchronous: nothing waits for the device."""
    tensor = torch.tensor(numbers, dtype=torch.float64, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)


class LossLog:
    """The losses and signals of all phases since the last reading."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.pages: dict[str, _Page] = {}

    def add(self, images: int, entries: list[Entry]) -> None:
        """Add the entries of a step, without waiting for the device."""
        for phase, names, values, samples in entries:
            page = self.pages.get(phase)
            if page is None:
                page = self.pages[phase] = _Page(names, values.device)
            if page.names != names:
                raise UserError(
                    f"phase {phase!r} returned the losses and signals {', '.join(page.names)}, then "
                    f"{', '.join(names)}: return the same names at every step"
                )
            if len(page.at) == CAPACITY:
                page.fold()
            page.slots[len(page.at)].copy_(values)
            page.at.append((images, samples))

    def request(self, extra: Sequence[float] = ()) -> Request:
        """Collect the values since the last call from all ranks, without waiting for the device.

        `extra` are numbers of this rank that all ranks receive with the losses, without another exchange.
        """
        own: list[Tensor] = []
        for page in self.pages.values():
            page.fold()
            own += [one.to(self.world.device) for one in (page.sums, page.first_bad, page.largest, page.varied_at)]
        vector = torch.cat([*own, _upload(list(extra), self.world.device)])
        copy = HostCopy({VALUES: self.world.gather(vector)})
        for page in self.pages.values():
            page.sums.zero_()
            page.first_bad.fill_(torch.inf)
            page.largest.zero_()
        return Request({phase: (page.names, page.last_at) for phase, page in self.pages.items()}, copy)


@dataclass(frozen=True)
class Request:
    """The values of all ranks since the last reading. They may still be on their way from the device."""

    pages: dict[str, tuple[tuple[str, ...], int]]  # by phase: the names, and the images seen at the last row
    copy: HostCopy

    def wait(self) -> Reading:
        """Wait for the values and return their means."""
        ranks = self.copy.wait()[VALUES]
        values: dict[str, float] = {}
        bad: list[NotFinite] = []
        largest: dict[str, float] = {}
        constant: set[str] = set()
        start = 0
        for phase, (names, last_at) in self.pages.items():
            count = len(names)
            sums, weight, first, magnitudes, varied_at = ranks[:, start : start + 4 * count + 1].split(
                [count, 1, count, count, count], dim=1
            )
            start += 4 * count + 1
            full_names = [f"{phase}/{name}" for name in names]
            constant |= {name for name, at in zip(full_names, varied_at.amax(0).tolist(), strict=True) if at < last_at}
            bad += [
                NotFinite(int(at), phase, name)
                for at, name in zip(first.amin(0).tolist(), names, strict=True)
                if at < torch.inf
            ]
            if weight.sum() == 0:
                continue
            largest |= zip(full_names, magnitudes.amax(0).tolist(), strict=True)
            means, by_rank = sums.sum(0) / weight.sum(), sums / weight
            spreads = by_rank.amax(0) - by_rank.amin(0)
            for name, mean, spread in zip(full_names, means.tolist(), spreads.tolist(), strict=True):
                values[name] = mean
                if len(ranks) > 1:
                    values[f"{SPREAD}{name}"] = spread
        # Within one step, report the first phase: later phases only inherit its non-finite values.
        first_bad = min(bad, key=lambda one: one.images, default=None)
        return Reading(values, first_bad, largest, frozenset(constant), ranks[:, start:].tolist())
