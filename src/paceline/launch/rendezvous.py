"""Where the hosts of a run meet, how many there are, and how long they wait for each other."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler

from paceline.config.settings import RunSettings
from paceline.core.errors import UserError
from paceline.parallel.store import LOOPBACK, is_here, is_loopback, join_store, own_address, serve_store

LAST_CALL_SECONDS = (
    3  # for hosts that come late, once the fewest are there; those later still are taken in by a restart
)
KEEP_ALIVE_SECONDS, KEEP_ALIVE_ATTEMPTS = 1, 4  # a host that was silent so long is lost
STORE_SECONDS = 30


@dataclass(frozen=True)
class Rendezvous:
    """What `--nnodes`, `--rdzv`, `--max-restarts` and the timeouts say; as it stands, one machine alone."""

    host: str = LOOPBACK
    port: int = 0
    fewest: int = 1
    most: int = 1
    max_restarts: int = 0
    timeout: float = 600.0
    join_timeout: float = 600.0

    @classmethod
    def of(cls, run: RunSettings) -> Rendezvous:
        """The meeting that a run's settings describe; refuses what cannot be."""
        fewest, most = parse_nodes(run.nnodes)
        host, port = parse_endpoint(run.rdzv) if run.rdzv else (LOOPBACK, 0)
        if most > 1 and not run.rdzv:
            raise UserError(f"--nnodes {run.nnodes}: hosts need a place to meet; give --rdzv HOST:PORT, one of them")
        if fewest < most and "/" in run.batch_size:
            raise UserError(
                f"--batch-size {run.batch_size}: with --nnodes {run.nnodes} the number of devices may change; "
                "give the batch over all devices"
            )
        try:
            own_address(host)
        except OSError as error:
            raise UserError(f"--rdzv {run.rdzv}: {error.strerror or error}") from None
        return cls(host, port, fewest, most, run.max_restarts, run.timeout, run.join_timeout)

    def open(self) -> DynamicRendezvousHandler:
        """The hosts' rendezvous, served by this one if the place is here; waits until it can be reached."""
        store = self._store()
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=f"{self.host}:{self.port}",
            run_id="paceline",
            min_nodes=self.fewest,
            max_nodes=self.most,
            local_addr=self._local_address(),
            join_timeout=max(1, round(self.join_timeout)),
            last_call_timeout=LAST_CALL_SECONDS,
            close_timeout=STORE_SECONDS,
            keep_alive_interval=KEEP_ALIVE_SECONDS,
            keep_alive_max_attempt=KEEP_ALIVE_ATTEMPTS,
        )
        return create_handler(store, C10dRendezvousBackend(store, parameters.run_id), parameters)

    def _local_address(self) -> str | None:
        """How the other hosts reach this one."""
        return None if self._knows_itself_only() else own_address(self.host)

    def _knows_itself_only(self) -> bool:
        """Whether this machine has the meeting's name as a loopback address, as Debian writes it in /etc/hosts."""
        return self.most > 1 and is_loopback(self.host)

    def _store(self) -> dist.TCPStore:
        patience = timedelta(seconds=STORE_SECONDS)
        if is_here(self.host):
            try:
                return serve_store(self.host, self.port, patience, on_all=self._knows_itself_only())
            except OSError:  # another process on this machine serves it
                if self.most == 1:
                    raise
        self._wait_for_host()
        return join_store(self.host, self.port, patience)

    def _wait_for_host(self) -> None:
        """In Python, where a request to stop is heard."""
        until = time.monotonic() + self.join_timeout
        while True:
            try:
                socket.create_connection((self.host, self.port), timeout=1).close()
                return
            except OSError as error:
                if time.monotonic() > until:
                    raise RendezvousTimeoutError(f"{error.strerror or error}") from None
                time.sleep(0.2)


def parse_nodes(text: str) -> tuple[int, int]:
    """`2` as (2, 2) and `1:4` as (1, 4)."""
    fewest, colon, most = text.partition(":")
    if not fewest.isdigit() or (colon and not most.isdigit()):
        raise UserError(f"--nnodes {text}: expected a number of hosts, or fewest:most like 1:4")
    numbers = int(fewest), int(most or fewest)
    if not 1 <= numbers[0] <= numbers[1]:
        raise UserError(f"--nnodes {text}: the fewest hosts must be at least 1 and no more than the most")
    return numbers


def parse_endpoint(text: str) -> tuple[str, int]:
    """`HOST:PORT` in its parts; an IPv6 address stands in brackets."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or not 1024 <= int(port) < 65536:
        raise UserError(f"--rdzv {text}: expected HOST:PORT, with a port from 1024 to 65535")
    return host, int(port)
