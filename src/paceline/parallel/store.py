"""The rendezvous store, which listens on one address only, and the network interface used to reach it."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from datetime import timedelta

import torch.distributed as dist

from paceline.core.errors import UserError

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
            master_listen_fd=listener.fileno(),
        )
        listener.detach()  # the store now owns the socket and closes it
    return store


def join_store(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Return a client of a store that another process serves."""
    return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)


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
