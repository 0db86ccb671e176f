"""With any launcher, each process determines its rank and GPU and connects to the other processes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from running import start_function_in_ranks

from paceline.config.settings import RunSettings
from paceline.core.errors import UserError
from paceline.parallel import world as environment
from paceline.parallel.world import check_devices, gpu_ids, join


class Gpus:
    """Simulated GPUs for a process with the given local rank."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        self.joined: dict[str, Any] = {}
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(dist, "init_process_group", self._rendezvous)
        monkeypatch.setattr(environment, "_rendezvous", lambda place, settings: (dist.HashStore(), None))

    def see(self, count: int, local_rank: int, local_size: int) -> None:
        self.patch.setattr(torch.cuda, "device_count", lambda: count)
        for name, value in {
            "RANK": local_rank,
            "WORLD_SIZE": local_size,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": local_size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": 29500,
        }.items():
            self.patch.setenv(name, str(value))

    def _rendezvous(self, backend: str, **arguments: Any) -> None:
        self.joined = {"backend": backend, **arguments}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(monkeypatch)


@pytest.mark.parametrize(
    ("visible", "named", "ids", "backend"),
    [
        (4, "", [0, 1, 2, 3], "nccl"),
        (1, "", [0, 0, 0, 0], "nccl"),  # srun --gpus-per-task=1: each process sees one GPU, with index 0
        (4, "3,2,1,0", [3, 2, 1, 0], "nccl"),
        (4, "0,0,1,1", [0, 0, 1, 1], "gloo"),
        (1, "0,0,0,0", [0, 0, 0, 0], "gloo"),
    ],
)
def test_each_process_uses_the_gpu_assigned_to_it(
    gpus: Gpus, visible: int, named: str, ids: list[int], backend: str
) -> None:
    for local_rank in range(4):
        gpus.see(visible, local_rank, 4)
        settings = RunSettings(devices=4, gpus=named)
        check_devices(settings)
        assert gpu_ids(settings) == ids
        world = join(settings, distributed=True)
        assert world.device == torch.device("cuda", ids[local_rank])
        assert world.backend == gpus.joined["backend"] == backend


def test_too_few_gpus_are_rejected(gpus: Gpus) -> None:
    gpus.see(4, 0, 4)
    with pytest.raises(UserError, match="--gpus 0,1: expected one ID for each of the 4 processes on this machine"):
        check_devices(RunSettings(devices=4, gpus="0,1"))
    gpus.see(2, 0, 4)
    with pytest.raises(UserError, match="--devices 4: PyTorch sees only 2 GPUs"):
        check_devices(RunSettings(devices=4))
    gpus.see(1, 0, 2)
    with pytest.raises(UserError, match="use --backend gloo"):
        check_devices(RunSettings(devices=2, gpus="0,0", backend="nccl"))
    check_devices(RunSettings(devices=2, backend="nccl"))


def test_two_processes_on_the_same_gpu_are_rejected_with_nccl(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(backend: str, **arguments: Any) -> None:
        raise dist.DistBackendError("NCCL error: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000")

    gpus.see(1, 0, 2)
    monkeypatch.setattr(dist, "init_process_group", fail)
    with pytest.raises(UserError, match="--devices 2: processes share a GPU"):
        join(RunSettings(devices=2), distributed=True)


def meet_twice() -> int:
    settings = RunSettings(accelerator="cpu", strategy="ddp", devices=2, timeout=100.0)
    for rendezvous in (1, 2):
        world = join(settings, distributed=True)
        assert world.sum(torch.tensor([float(rendezvous * (world.rank + 1))])).item() == 3 * rendezvous
        if world.is_first and rendezvous == 1:
            time.sleep(1.0)
        world.leave()
    return 0


def test_processes_can_reconnect_even_if_rank_0_is_slow_to_disconnect(tmp_path: Path) -> None:
    ranks = start_function_in_ranks(tmp_path, 2, meet_twice)
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
