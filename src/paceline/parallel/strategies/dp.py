"""torch.nn.DataParallel: one process, a thread per GPU, the batch cut anew at every forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.parallel.environment import gpu_ids
from paceline.parallel.strategy import PhaseCall, Strategy
from paceline.recipe import Batch, Loss, Phase, Recipe


class _ReplicaCall(PhaseCall):
    """Gives scalars a dimension and counts samples, so that replicas of unlike size can be gathered and weighted."""

    def forward(self, phase: str, batch: Batch) -> tuple[Loss, Tensor]:  # type: ignore[override]
        loss = super().forward(phase, batch)
        first = next(iter(batch.values()))
        rows = lambda scalars: {name: value.reshape(1) for name, value in scalars.items()}  # noqa: E731
        count = first.new_full((1,), len(first), dtype=torch.float64)  # filled there: a copy would wait for the device
        return Loss(rows(loss.terms), loss.shared, rows(loss.facts)), count


class DataParallel(Strategy):
    """Splits each batch over the GPUs of this process; on CPU there is nothing to split over."""

    @property
    def num_devices(self) -> int:
        return 1 if self.world.device.type == "cpu" else len(gpu_ids(self.settings))

    def place(self, recipe: Recipe) -> None:
        super().place(recipe)
        if self.world.device.type == "cpu":
            self.notes.append("dp: DataParallel has only one CPU to use, so this is the same as single")
            return
        self.replicas = nn.DataParallel(_ReplicaCall(recipe, self.precision), device_ids=gpu_ids(self.settings))

    def generators(self) -> list[torch.Generator]:
        if self.world.device.type == "cpu":
            return super().generators()
        return [torch.cuda.default_generators[number] for number in dict.fromkeys(gpu_ids(self.settings))]

    def forward(self, phase: Phase, batch: Batch) -> Loss:
        if self.world.device.type == "cpu":
            return super().forward(phase, batch)
        loss, counts = self.replicas(phase.name, batch)
        share = counts / counts.sum()
        mean = lambda rows: {name: (row * share.to(row.dtype)).sum() for name, row in rows.items()}  # noqa: E731
        return Loss(mean(loss.terms), loss.shared, mean(loss.facts))
