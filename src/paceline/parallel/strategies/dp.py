"""torch.nn.DataParallel: one process with one thread per GPU; each forward pass splits the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch, Loss, Phase, Recipe
from paceline.parallel.precision import Precision
from paceline.parallel.strategy import Feature, MemoryShares, PhaseCall, Strategy
from paceline.parallel.world import World, gpu_ids


class _ReplicaCall(PhaseCall):
    """Returns the losses and the sample count, so that replicas with different batch sizes can be weighted."""

    def forward(self, phase: str, batch: Batch) -> tuple[Loss, Tensor]:  # type: ignore[override]
        loss = super().forward(phase, batch)
        first = next(iter(batch.values()))
        count = first.new_full((1,), len(first), dtype=torch.float64)  # copying the count from the host would block
        return Loss(_as_rows(loss.terms), loss.shared, _as_rows(loss.signals)), count


class ReplicaThreads:
    """Persistent threads, one per replica.

    torch.nn.DataParallel starts new threads in every forward pass. cuDNN caches its plans and benchmarks per thread, so
    it would repeat its search in every step.
    """

    def __init__(self, count: int) -> None:
        self.threads = [ThreadPoolExecutor(1, f"replica-{number}") for number in range(count)]

    def run(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run each call on its replica's thread and return the results; raise only after all calls have ended."""
        running = [thread.submit(call) for thread, call in zip(self.threads, calls, strict=False)]
        wait(running)
        return [one.result() for one in running]


class _Replicas(nn.DataParallel[_ReplicaCall]):
    """DataParallel with persistent threads."""

    def __init__(self, module: _ReplicaCall, device_ids: list[int]) -> None:
        super().__init__(module, device_ids=device_ids)
        self.threads = ReplicaThreads(len(device_ids))

    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        grad = torch.is_grad_enabled()  # threads do not inherit the grad mode, device or stream

        def call(replica: nn.Module, args: Any, kwargs: Any, device: int, stream: torch.cuda.Stream) -> Any:
            with torch.set_grad_enabled(grad), torch.cuda.device(device), torch.cuda.stream(stream):
                return replica(*args, **kwargs)

        # A batch with fewer samples than devices has fewer replicas.
        devices = self.device_ids[: len(replicas)]
        parts = zip(replicas, inputs, kwargs, devices, map(torch.cuda.current_stream, devices), strict=True)
        return self.threads.run([partial(call, *part) for part in parts])


class DataParallel(Strategy):
    """Splits each batch across this process's GPUs. On a CPU, it runs like `single`."""

    complexity = 3

    @classmethod
    def why_not(cls, feature: Feature) -> str:
        return {
            "capture": "DataParallel's threads cannot be captured in a CUDA graph",
            "compile": "DataParallel copies the networks in every step",
            "recompute": "DataParallel copies the networks in every step",
            "parity": "each replica computes its own BatchNorm statistics",
            "breakdown": "DataParallel uses one process for all devices",
            "cpu": "DataParallel needs GPUs; on a CPU it is the same as single",
        }[feature]

    def __init__(self, settings: RunSettings, world: World, precision: Precision, recipe: Recipe) -> None:
        super().__init__(settings, world, precision, recipe)
        self.replicas: _Replicas | None = None
        if world.device.type == "cpu":
            self.notes.append("dp: on a CPU, DataParallel does not split batches, so dp is the same as single")
        else:
            self.replicas = _Replicas(_ReplicaCall(recipe, precision), gpu_ids(settings))

    @classmethod
    def memory_shares(cls, recipe: Recipe, num_devices: int) -> MemoryShares:
        if num_devices == 1:
            return MemoryShares()
        # The first GPU also stores the whole batch and, while gradients are added, those of a second GPU.
        return MemoryShares(gradient_copies=2, batch_copies=1 + num_devices)

    @property
    def local_devices(self) -> list[torch.device]:
        return (
            [torch.device("cuda", number) for number in gpu_ids(self.settings)]
            if self.replicas
            else [self.world.device]
        )

    def forward(self, phase: Phase, batch: Batch) -> Loss:
        if not self.replicas:
            return super().forward(phase, batch)
        loss, counts = self.replicas(phase.name, batch)
        share = counts / counts.sum()
        return Loss(_weighted(loss.terms, share), loss.shared, _weighted(loss.signals, share))


def _weighted(rows: dict[str, Tensor], share: Tensor) -> dict[str, Tensor]:
    """Return the means over replicas, weighted by sample count."""
    return {name: (row * share.to(row.dtype)).sum() for name, row in rows.items()}


def _as_rows(scalars: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.reshape(1) for name, value in scalars.items()}
