"""torch.nn.DataParallel: one process, a thread per GPU, the batch cut anew at every forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.contracts.recipe import Batch, Loss, Phase, Recipe
from paceline.parallel.strategy import PhaseCall, Strategy
from paceline.parallel.world import gpu_ids


class _ReplicaCall(PhaseCall):
    """Gives scalars a dimension and counts samples, so that replicas of unlike size can be gathered and weighted."""

    def forward(self, phase: str, batch: Batch) -> tuple[Loss, Tensor]:  # type: ignore[override]
        loss = super().forward(phase, batch)
        first = next(iter(batch.values()))
        rows = lambda scalars: {name: value.reshape(1) for name, value in scalars.items()}  # noqa: E731
        count = first.new_full((1,), len(first), dtype=torch.float64)  # filled there: a copy would wait for the device
        return Loss(rows(loss.terms), loss.shared, rows(loss.signals)), count


class ReplicaThreads:
    """A thread for each replica, the same in every step.

    torch.nn.DataParallel starts new ones at every forward. cuDNN's plans, and which was found fastest, are kept by
    thread, so that every step would search again.
    """

    def __init__(self, count: int) -> None:
        self.threads = [ThreadPoolExecutor(1, f"replica-{number}") for number in range(count)]

    def run(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """What the calls give, each made on its replica's thread; an error comes when no other is still at work."""
        running = [thread.submit(call) for thread, call in zip(self.threads, calls, strict=False)]
        wait(running)
        return [one.result() for one in running]


class _Replicas(nn.DataParallel):
    """DataParallel on threads that stay."""

    def __init__(self, module: nn.Module, device_ids: list[int]) -> None:
        super().__init__(module, device_ids=device_ids)
        self.threads = ReplicaThreads(len(device_ids))

    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        learns = torch.is_grad_enabled()  # which a thread does not know by itself, nor its device and stream

        def call(replica: nn.Module, given: Any, named: Any, device: int, stream: torch.cuda.Stream) -> Any:
            with torch.set_grad_enabled(learns), torch.cuda.device(device), torch.cuda.stream(stream):
                return replica(*given, **named)

        # A batch with fewer samples than devices has fewer replicas.
        devices = self.device_ids[: len(replicas)]
        parts = zip(replicas, inputs, kwargs, devices, map(torch.cuda.current_stream, devices), strict=True)
        return self.threads.run([partial(call, *part) for part in parts])


class DataParallel(Strategy):
    """Splits each batch over the GPUs of this process; on CPU there is nothing to split over."""

    complexity = 3
    cannot_capture = "DataParallel's threads cannot be captured"
    cannot_compile = "DataParallel copies the networks in every step"
    parity_obstacle = "its BatchNorm is separate in each replica"
    ladder_obstacle = "one process drives all its devices"
    cpu_obstacle = "DataParallel needs GPUs; on a CPU it is the same as single"

    @property
    def num_devices(self) -> int:
        return 1 if self.world.device.type == "cpu" else len(gpu_ids(self.settings))

    def place(self, recipe: Recipe) -> None:
        super().place(recipe)
        if self.world.device.type == "cpu":
            self.notes.append("dp: DataParallel has only one CPU to use, so this is the same as single")
            return
        self.replicas = _Replicas(_ReplicaCall(recipe, self.precision), gpu_ids(self.settings))

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
        return Loss(mean(loss.terms), loss.shared, mean(loss.signals))
