"""The processes of a run: their devices, and the groups through which they communicate."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.config.settings import RunSettings
from paceline.core.errors import UserError
from paceline.core.ordered_map import num_cores
from paceline.core.watch import is_watched, recorder, start_operation
from paceline.parallel.batchnorm import sum_over_processes
from paceline.parallel.group import (
    Peers,
    Place,
    await_rank_0,
    call_roll,
    check_interface,
    choose_interface,
    is_loopback,
    join_store,
    meeting_point,
    place_from,
    place_of,
    serve_store,
)

MAX_CPU_PROCESSES = 1024
EXAMINATION_SECONDS = 30.0  # how much longer than `timeout` a collective, or a store without `Peers`, waits


@dataclass(frozen=True)
class World:
    """The processes of a run: this process's rank, its device, and communication with the others."""

    place: Place
    device: torch.device
    backend: str = ""  # empty if there is no process group
    peers: Peers | None = field(default=None, repr=False, compare=False)  # None if a launcher watches the ranks

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        return self.place.size

    @property
    def is_first(self) -> bool:
        """Whether this process has rank 0."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor across all processes; the tensor itself may be overwritten."""
        return sum_over_processes(tensor) if self.size > 1 else tensor

    def gather(self, vector: Tensor) -> Tensor:
        """Return every process's vector, one per row."""
        if self.size == 1:
            return vector.unsqueeze(0)
        start_operation("gather")
        rows = [torch.empty_like(vector) for _ in range(self.size)]
        dist.all_gather(rows, vector.contiguous())
        return torch.stack(rows)

    def broadcast(self, value: object, source: int = 0) -> object:
        """Return the source rank's value on every process."""
        if self.size == 1:
            return value
        start_operation("broadcast")
        box = [value]
        dist.broadcast_object_list(box, src=source)
        return box[0]

    def gather_strings(self, text: str) -> list[str]:
        """Return the strings from all processes, in rank order."""
        if self.size == 1:
            return [text]
        start_operation("gather texts")
        texts = [""] * self.size
        dist.all_gather_object(texts, text)
        return texts

    def wait_for_all(self) -> None:
        """Wait until every process has called this."""
        if self.size > 1:
            start_operation("barrier")
            dist.barrier()

    def leave(self) -> None:
        """Destroy the process group."""
        if self.peers:
            self.peers.leave()
        if self.backend and dist.is_initialized():
            dist.destroy_process_group()

    def abandon(self) -> None:
        """Leave after an error. With several processes, do nothing, since the others notice when this process exits."""
        if self.size == 1:
            self.leave()

    def explain(self, error: BaseException) -> str:
        """Report an error to the other ranks; return a message that names the rank that caused it; "" if none did."""
        return self.peers.explain(error) if self.peers else ""

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Report an error to the other ranks; if one of them caused it, raise a UserError that says so."""
        try:
            yield
        except BaseException as error:
            if lost := self.explain(error):
                raise UserError(lost) from error
            raise


def gpu_ids(settings: RunSettings) -> list[int]:
    """Return the GPU ID of each process on this machine: from `--gpus`, or 0, 1, 2, …"""
    if not settings.gpus:
        place = place_of(settings)
        if place and torch.cuda.device_count() == 1:
            return [0] * place.local_size  # `srun --gpus-per-task=1`: each process sees only its own GPU, as ID 0
        return list(range(place.local_size if place else settings.devices))
    try:
        return [int(word) for word in settings.gpus.split(",")]
    except ValueError:
        raise UserError(f"--gpus {settings.gpus!r}: expected comma-separated IDs, like 2,3") from None


def _share_a_gpu(settings: RunSettings) -> bool:
    """Return whether `--gpus` assigns one GPU to several processes, which NCCL does not support."""
    ids = gpu_ids(settings)
    return bool(settings.gpus) and len(set(ids)) < len(ids)


def uses_cuda(settings: RunSettings) -> bool:
    """Return whether this run uses GPUs."""
    available = torch.cuda.is_available()
    if settings.accelerator == "cuda" and not available:
        raise UserError("--accelerator cuda: no CUDA device is visible to PyTorch; use --accelerator cpu")
    return available and settings.accelerator != "cpu"


def check_devices(settings: RunSettings) -> None:
    """Raise UserError for devices that do not exist, before anything is started."""
    if not uses_cuda(settings):
        if settings.gpus:
            raise UserError(
                f"--gpus {settings.gpus}: no CUDA device is visible to PyTorch, or --accelerator is cpu; remove --gpus"
            )
        if settings.devices > MAX_CPU_PROCESSES:
            raise UserError(f"--devices {settings.devices}: must be at most {MAX_CPU_PROCESSES:,} on a CPU")
        return
    count, ids = torch.cuda.device_count(), gpu_ids(settings)
    missing = [number for number in ids if not 0 <= number < count]
    if missing:
        flag = f"--gpus {settings.gpus}" if settings.gpus else f"--devices {settings.devices}"
        gpus = "1 GPU (ID 0)" if count == 1 else f"{count} GPUs (IDs 0 to {count - 1})"
        raise UserError(f"{flag}: PyTorch sees only {gpus}; use fewer devices or other IDs")
    place = place_of(settings)
    if place and len(ids) < place.local_size:
        raise UserError(
            f"--gpus {settings.gpus}: expected one ID for each of the {place.local_size} processes on this machine"
        )
    if settings.backend == "nccl" and _share_a_gpu(settings):
        raise UserError(f"--gpus {settings.gpus}: NCCL cannot run two processes on one GPU; use --backend gloo")


def join(settings: RunSettings, *, distributed: bool) -> World:
    """Return this process's world; with `distributed`, create the process group."""
    place = place_from(os.environ) or Place()
    cuda = uses_cuda(settings)
    if cuda:
        device = torch.device("cuda", gpu_ids(settings)[place.local_rank])
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, num_cores() // place.local_size))
    if not distributed:
        if place.size > 1:
            raise UserError(
                f"--strategy {settings.strategy}: needs 1 process, but {place.size} were started; use ddp or lightning"
            )
        return World(place, device)
    backend = settings.backend
    if backend == "auto":
        backend = "nccl" if cuda and not _share_a_gpu(settings) else "gloo"
    if backend == "nccl" and not cuda:
        raise UserError("--backend nccl: needs GPUs, and this run uses the CPU; use --backend gloo")
    if place.size == 1 and "MASTER_ADDR" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        host, port = meeting_point(os.environ)
        os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
        os.environ |= {"RANK": str(place.rank), "WORLD_SIZE": str(place.size), "LOCAL_RANK": str(place.local_rank)}
        own = device if backend == "nccl" else None
        # A hang is examined at `timeout`, while all processes still wait. Collectives must not fail before that.
        timeout = timedelta(seconds=settings.timeout + EXAMINATION_SECONDS)
        recorder().join(place.rank, place.size)
        check_interface(backend)
        store, peers = _rendezvous(place, settings)
        world = World(place, device, backend, peers)
        try:
            with world.reporting():
                dist.init_process_group(
                    backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout, device_id=own
                )
        except dist.DistBackendError as error:
            if "Duplicate GPU" in str(error):  # only NCCL can detect this if each process sees one GPU
                raise UserError(f"--devices {place.size}: processes share a GPU; start one process per GPU") from error
            raise
        return world
    return World(place, device, backend)


def _rendezvous(place: Place, settings: RunSettings) -> tuple[dist.Store, Peers | None]:
    """Return the store through which a run's processes find each other, and a thread to watch them if no launcher does.

    If the same processes form a new group for the next run, they keep the store and use a new prefix. Then no process
    connects to a store that is about to close, or reads keys from the previous group. The processes start and end their
    groups together, so their group counts agree.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    choose_interface(host, place.num_nodes)
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # the default under torchrun
    alone = place.size > 1 and not is_watched()
    key, timeout = (host, port, place), timedelta(seconds=settings.timeout + (0 if alone else EXAMINATION_SECONDS))
    if key not in _stores:
        _stores.clear()  # closes the previous store, which may use this port
        _num_rendezvous.clear()
        if place.rank == 0 and not by_agent:
            _stores[key] = serve_store(host, port, timeout, on_all=place.num_nodes > 1 and is_loopback(host))
        else:
            if alone:
                await_rank_0(host, port, settings.start_timeout)
            _stores[key] = join_store(host, port, timeout)
    # An agent's store outlives the processes, so its prefix includes the restart count. A store served by rank 0 ends
    # with the processes and uses no count, since the count of a host that rejoins would not match.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if by_agent else "0"
    _num_rendezvous[key] += 1
    prefix = f"paceline-{restart}-{_num_rendezvous[key]}"
    store = dist.PrefixStore(prefix, _stores[key])
    if not alone:
        return store, None
    call_roll(store, place.rank, place.size, settings.start_timeout)
    own, line = dist.PrefixStore(prefix, join_store(host, port, timeout)), socket.create_connection((host, port))
    return store, Peers(own, line, place.rank, place.size)


_stores: dict[tuple[str, int, Place], dist.Store] = {}  # at most one entry: the last store that this process used
_num_rendezvous: Counter[tuple[str, int, Place]] = Counter()


class BackgroundGroup:
    """A separate gloo group, so that a thread can communicate while the main thread trains."""

    def __init__(self, world: World, timeout_seconds: float) -> None:
        """Create the group; all processes must do so at the same time, in their main thread."""
        self.rank, self._size = world.rank, world.size
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        assert isinstance(group, dist.ProcessGroup)
        self._group = group

    def exchange(self, text: str) -> list[str]:
        """Return the texts of all processes, in rank order; wait until every process has called this."""
        texts = [""] * self._size
        dist.all_gather_object(texts, text, group=self._group)
        return texts
