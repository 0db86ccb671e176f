"""Which processes share the run: read from the environment that torchrun, srun or Kubernetes set."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.config.settings import RunSettings
from paceline.core.errors import UserError
from paceline.parallel.exchange import sum_over_processes
from paceline.parallel.store import is_loopback, join_store, serve_store, choose_interface

FIRST_PORT, NUM_PORTS = 10_000, 10_000  # below those that the kernel gives to anyone who asks


@dataclass(frozen=True)
class Place:
    """A process's place among those that were started together."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1  # processes on this machine; another may have more or fewer
    num_nodes: int = 1


def place_from(environ: Mapping[str, str]) -> Place | None:
    """This process's place, if something started several processes; None if a person started this one."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        size, local_rank = int(environ["WORLD_SIZE"]), int(environ.get("LOCAL_RANK", 0))
        local_size = int(environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
        num_nodes = int(environ.get("GROUP_WORLD_SIZE", max(1, size // local_size)))
        return Place(int(environ["RANK"]), size, local_rank, local_size, num_nodes)
    # SLURM sets SLURM_PROCID in batch scripts too; only tasks of srun have a step with several tasks.
    if int(environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1 and "SLURM_PROCID" in environ:
        tasks, node = _tasks_per_node(environ), int(environ.get("SLURM_NODEID", 0))
        return Place(
            rank=int(environ["SLURM_PROCID"]),
            size=int(environ["SLURM_STEP_NUM_TASKS"]),
            local_rank=int(environ["SLURM_LOCALID"]),
            local_size=tasks[node if node < len(tasks) else 0],
            num_nodes=len(tasks),
        )
    return None


def place_of(settings: RunSettings) -> Place | None:
    """This process's place; with `--rdzv`, only one that our launcher gave it: `srun` then starts launchers."""
    return None if settings.rdzv and "RANK" not in os.environ else place_from(os.environ)


def _tasks_per_node(environ: Mapping[str, str]) -> list[int]:
    """SLURM's `2(x3),1` as 2, 2, 2, 1."""
    words = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    return [int(count) for count, times in words for _ in range(int(times or 1))]


def slurm_rendezvous(environ: Mapping[str, str]) -> tuple[str, int]:
    """The first host of the step, and a port that follows from the numbers of job and step."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_NODELIST"]
    first = re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes).split(",")[0]  # of gpu[07-09,12]-ib, gpu07-ib
    job, step = int(environ.get("SLURM_JOB_ID", 0)), int(environ.get("SLURM_STEP_ID", 0))
    # A prime apart, so that the steps of one job and those of the next, on the same host, do not meet.
    return first, FIRST_PORT + (7919 * job + step) % NUM_PORTS


@dataclass(frozen=True)
class World:
    """The processes of a run, this one's place among them, and its device."""

    place: Place
    device: torch.device
    backend: str = ""  # empty where there is one process and no group

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        return self.place.size

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over all processes, on each; the tensor itself may be overwritten."""
        return sum_over_processes(tensor) if self.size > 1 else tensor

    def gather(self, vector: Tensor) -> Tensor:
        """Every process's vector as a row, on each."""
        if self.size == 1:
            return vector.unsqueeze(0)
        rows = [torch.empty_like(vector) for _ in range(self.size)]
        dist.all_gather(rows, vector.contiguous())
        return torch.stack(rows)

    def broadcast(self, value: object, source: int = 0) -> object:
        """One process's value, the first one's if nothing else is said, on each."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=source)
        return box[0]

    def gather_strings(self, word: str) -> list[str]:
        """Every process's word, on each."""
        if self.size == 1:
            return [word]
        words = [""] * self.size
        dist.all_gather_object(words, word)
        return words

    def wait_for_all(self) -> None:
        """Returns when every process has come here."""
        if self.size > 1:
            dist.barrier()

    def leave(self) -> None:
        """Ends this process's part in the group."""
        if self.backend and dist.is_initialized():
            dist.destroy_process_group()

    def abandon(self) -> None:
        """Leaves after an error; a process that others wait for leaves by ending, so that they notice."""
        if self.size == 1:
            self.leave()


def gpu_ids(settings: RunSettings) -> list[int]:
    """The GPU of each process on this machine by its id: as `--gpus` says, or each takes the next."""
    if not settings.gpus:
        place = place_of(settings)
        if place and torch.cuda.device_count() == 1:
            return [0] * place.local_size  # `srun --gpus-per-task=1`: each sees its own GPU only, as id 0
        return list(range(place.local_size if place else settings.devices))
    try:
        return [int(word) for word in settings.gpus.split(",")]
    except ValueError:
        raise UserError(f"--gpus {settings.gpus!r}: expected ids with commas, like 2,3") from None


def _share_a_gpu(settings: RunSettings) -> bool:
    """Whether `--gpus` gives one GPU to several processes, which NCCL refuses."""
    ids = gpu_ids(settings)
    return bool(settings.gpus) and len(set(ids)) < len(ids)


def uses_cuda(settings: RunSettings) -> bool:
    """Whether this run computes on GPUs."""
    available = torch.cuda.is_available()
    if settings.accelerator == "cuda" and not available:
        raise UserError("--accelerator cuda: no CUDA device is visible to PyTorch here; use --accelerator cpu")
    return available and settings.accelerator != "cpu"


def check_devices(settings: RunSettings) -> None:
    """Refuses devices that are not there, before anything is started."""
    if not uses_cuda(settings):
        if settings.gpus:
            raise UserError(f"--gpus {settings.gpus}: no CUDA device is visible to PyTorch here")
        return
    count, ids = torch.cuda.device_count(), gpu_ids(settings)
    missing = [number for number in ids if not 0 <= number < count]
    if missing:
        flag = f"--gpus {settings.gpus}" if settings.gpus else f"--devices {settings.devices}"
        raise UserError(
            f"{flag}: there {'is 1 GPU' if count == 1 else f'are {count} GPUs'} here (ids 0 to {count - 1})"
        )
    place = place_of(settings)
    if place and len(ids) < place.local_size:
        raise UserError(f"--gpus {settings.gpus}: {len(ids)} for the {place.local_size} processes on this machine")
    if settings.backend == "nccl" and _share_a_gpu(settings):
        raise UserError(f"--gpus {settings.gpus}: NCCL cannot run two processes on one GPU; use --backend gloo")


def join(settings: RunSettings, *, distributed: bool) -> World:
    """This process's world; with `distributed`, after meeting the other processes."""
    place = place_from(os.environ) or Place()
    cuda = uses_cuda(settings)
    if cuda:
        device = torch.device("cuda", gpu_ids(settings)[place.local_rank])
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.local_size))
    if not distributed:
        if place.size > 1:
            raise UserError(
                f"--strategy {settings.strategy}: one process, but {place.size} were started; use ddp or lightning"
            )
        return World(place, device)
    backend = settings.backend
    if backend == "auto":
        backend = "nccl" if cuda and not _share_a_gpu(settings) else "gloo"
    if place.size == 1 and "MASTER_ADDR" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        if "MASTER_ADDR" not in os.environ:
            host, port = slurm_rendezvous(os.environ)
            os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
        os.environ |= {"RANK": str(place.rank), "WORLD_SIZE": str(place.size), "LOCAL_RANK": str(place.local_rank)}
        own, timeout = device if backend == "nccl" else None, timedelta(seconds=settings.timeout)
        try:
            dist.init_process_group(
                backend,
                store=_rendezvous(place, timeout),
                rank=place.rank,
                world_size=place.size,
                timeout=timeout,
                device_id=own,
            )
        except dist.DistBackendError as error:
            if "Duplicate GPU" in str(error):  # that the one GPU which each sees is the same shows only here
                raise UserError(f"--devices {place.size}: processes share a GPU; start one for each GPU") from error
            raise
    return World(place, device, backend)


def _rendezvous(place: Place, timeout: timedelta) -> dist.Store:
    """What the processes of a run find each other by, as the environment says.

    A process that meets the same others again, for another run, keeps the store and takes a part of it that
    nobody has written to: neither a store about to close nor the words of the last meeting are taken for the new one's.
    They count their meetings alike, since they begin and end together.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    choose_interface(host, place.num_nodes)
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun as it comes
    here = (host, port, place)
    if here not in _stores:
        _stores.clear()  # which closes the one before: it may have this port
        _num_rendezvous.clear()
        if place.rank == 0 and not by_agent:
            _stores[here] = serve_store(host, port, timeout, on_all=place.num_nodes > 1 and is_loopback(host))
        else:
            _stores[here] = join_store(host, port, timeout)
    # An agent's store outlives the processes. Ours does not, and a host that came back counts its restarts anew.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if by_agent else "0"
    _num_rendezvous[here] += 1
    return dist.PrefixStore(f"paceline-{restart}-{_num_rendezvous[here]}", _stores[here])


_stores: dict[tuple[str, int, Place], dist.Store] = {}  # the one where this process last met others
_num_rendezvous: Counter[tuple[str, int, Place]] = Counter()
