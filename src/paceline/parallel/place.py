"""Where a process runs in a group, and the rendezvous store at which the group meets."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import re
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from paceline.config.settings import RunSettings
from paceline.core.errors import UserError

FIRST_PORT, NUM_PORTS = 10_000, 10_000  # a port range below the kernel's ephemeral ports
MAX_PORT = 65_535


@dataclass(frozen=True)
class Place:
    """A process's rank, and the size of its group."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1  # processes on this machine; other machines may have more or fewer
    num_nodes: int = 1


def place_from(environ: Mapping[str, str]) -> Place | None:
    """Return this process's rank and world size if a launcher started it; None if the user started it."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        size = _number(environ, "WORLD_SIZE", at_least=1)
        rank = _number(environ, "RANK", at_most=size - 1)
        local_rank = _number(environ, "LOCAL_RANK", 0)
        local_size = _number(environ, "LOCAL_WORLD_SIZE", local_rank + 1, at_least=local_rank + 1)
        num_nodes = _number(environ, "GROUP_WORLD_SIZE", max(1, size // local_size), at_least=1)
        return Place(rank, size, local_rank, local_size, num_nodes)
    # SLURM also sets SLURM_PROCID in batch scripts; only srun starts steps with several tasks.
    if "SLURM_PROCID" in environ and (size := _number(environ, "SLURM_STEP_NUM_TASKS", 1)) > 1:
        tasks, node = _tasks_per_node(environ), _number(environ, "SLURM_NODEID", 0)
        return Place(
            rank=_number(environ, "SLURM_PROCID", at_most=size - 1),
            size=size,
            local_rank=_number(environ, "SLURM_LOCALID"),
            local_size=tasks[node if node < len(tasks) else 0],
            num_nodes=len(tasks),
        )
    return None


def place_of(settings: RunSettings) -> Place | None:
    """Return this process's rank and group size. With `--rdzv`, srun starts launchers, so its variables are ignored."""
    return None if settings.rdzv and "RANK" not in os.environ else place_from(os.environ)


def meeting_point(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the host and the port at which the processes of a group meet; raise UserError if they are not usable."""
    if "MASTER_ADDR" in environ:
        host, port = environ["MASTER_ADDR"], _number(environ, "MASTER_PORT", at_least=1, at_most=MAX_PORT)
    elif "SLURM_STEP_NODELIST" in environ or "SLURM_NODELIST" in environ:
        host, port = slurm_rendezvous(environ)
    else:
        raise UserError(
            "RANK and WORLD_SIZE are set, but MASTER_ADDR and MASTER_PORT are not: set them to the host of rank 0 and "
            "a free port on that host, or use torchrun"
        )
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UserError(f"MASTER_ADDR={host}: this machine cannot find the host ({error})") from None
    return host, port


def slurm_rendezvous(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the first host of the SLURM step, and a port derived from the job and step IDs."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_NODELIST"]
    first = re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes).split(",")[0]  # e.g. gpu[07-09,12]-ib → gpu07-ib
    job, step = _number(environ, "SLURM_JOB_ID", 0), _number(environ, "SLURM_STEP_ID", 0)
    # Ports of consecutive jobs are a prime number apart, so that their steps do not collide on one host.
    return first, FIRST_PORT + (7919 * job + step) % NUM_PORTS


def _tasks_per_node(environ: Mapping[str, str]) -> list[int]:
    """Parse SLURM's `2(x3),1` into 2, 2, 2, 1."""
    words = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    return [int(count) for count, times in words for _ in range(int(times or 1))]


def _number(
    environ: Mapping[str, str], name: str, default: int | None = None, *, at_least: int = 0, at_most: int | None = None
) -> int:
    """Return the value of a variable that a launcher sets; raise UserError if it is not a number within the limits."""
    limits = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
    text = environ.get(name)
    if text is None:
        if default is None:
            raise UserError(f"the environment variable {name} is not set: expected a whole number {limits}")
        return default
    try:
        value = int(text)
    except ValueError:
        value = at_least - 1
    if value < at_least or (at_most is not None and value > at_most):
        raise UserError(f"the environment variable {name} is {text!r}: expected a whole number {limits}")
    return value


SIOCGIFADDR = 0x8915  # from <linux/sockios.h>: request for an interface's address
LOOPBACK = "127.0.0.1"


def serve_store(host: str, port: int, timeout: timedelta, *, on_all: bool = False) -> dist.TCPStore:
    """Serve a store on this address only; with `on_all`, on all addresses, as torch does. Port 0 picks a free port."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", port) if on_all else address)
        listener.listen(4096)
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            host,
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),  # the store owns the socket, and closes it even if it cannot start
        )
    return store


def join_store(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Return a client of a store that another process serves."""
    return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)


def await_server(host: str, port: int, seconds: float) -> None:
    """Wait until a server can be reached, in Python and not in torch, so that signals are handled; raise OSError."""
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=1.0).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def own_address(host: str) -> str:
    """Return the local address that this machine uses to reach a host."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # connecting a datagram socket sends nothing
        return str(probe.getsockname()[0])


def is_loopback(host: str) -> bool:
    """Return whether a name or an address is a loopback address."""
    return ipaddress.ip_address(own_address(host).partition("%")[0]).is_loopback


def is_here(host: str) -> bool:
    """Return whether a name or an address belongs to this machine."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        try:
            trial.bind(address)
        except OSError:
            return False
    return True


def choose_interface(host: str, num_nodes: int) -> None:
    """Make the process group use the interface that reaches a host, unless the environment already sets one.

    By default, gloo listens on the address that the machine's host name resolves to, even if all processes are on the
    same machine.
    """
    local = is_loopback(host)
    if local and num_nodes > 1:
        return  # the host name resolves to a loopback address: leave the choice to gloo and NCCL
    name = "lo" if local else _interface_of(own_address(host))
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    if local:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def check_interface(backend: str) -> None:
    """Raise UserError if the environment makes a backend use network interfaces that do not exist."""
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    value = os.environ.get(variable, "")
    if not value or value.startswith("^"):  # NCCL: all interfaces except these
        return
    names = [name for _, name in socket.if_nameindex()]
    is_exact = backend == "gloo" or value.startswith("=")  # otherwise, NCCL matches the beginning of the names
    words = [word.partition(":")[0] for word in value.removeprefix("=").split(",")]
    exist = [any(name == word if is_exact else name.startswith(word) for name in names) for word in words]
    if not (all(exist) if backend == "gloo" else any(exist)):
        raise UserError(f"{variable}={value}: no such network interface; choose from: {', '.join(names)}")


def _interface_of(address: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # the interface has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""
