"""Where processes meet: a store that listens on one address, and the network interface that leads to it."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from datetime import timedelta

import torch.distributed as dist

SIOCGIFADDR = 0x8915  # from <linux/sockios.h>: an interface's address
LOOPBACK = "127.0.0.1"


def serve_store(host: str, port: int, timeout: timedelta, *, on_all: bool = False) -> dist.TCPStore:
    """A store that this process serves, on that address alone (torch's own listens on all); port 0 takes a free one."""
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
        listener.detach()  # the store closes it
    return store


def join_store(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """A store that another process serves."""
    return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)


def own_address(host: str) -> str:
    """The address of this machine that faces a host; the host's own, where it is this machine."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as facing:
        facing.connect(address)  # of a datagram socket: nothing is sent
        return str(facing.getsockname()[0])


def is_loopback(host: str) -> bool:
    """Whether a name or an address leads to this machine alone."""
    return ipaddress.ip_address(own_address(host).partition("%")[0]).is_loopback


def is_here(host: str) -> bool:
    """Whether a name or an address belongs to this machine."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        try:
            trial.bind(address)
        except OSError:
            return False
    return True


def choose_interface(host: str, num_nodes: int) -> None:
    """Has this process's group talk on the interface that leads to a host, where the environment names no other.

    Left alone, gloo listens on whatever address the machine's own name has, even among processes of one machine.
    """
    alone = is_loopback(host)
    if alone and num_nodes > 1:
        return  # a machine that knows its own name as a loopback address; the group finds its way as it can
    name = "lo" if alone else _interface_of(own_address(host))
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    if alone:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def _interface_of(address: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""
