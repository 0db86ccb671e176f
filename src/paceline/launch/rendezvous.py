"""The rendezvous for a run's hosts: its address, the number of hosts, and how long they wait for each other."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler

from paceline.config.settings import RunSettings
from paceline.core.errors import UserError
from paceline.parallel.group import LOOPBACK, await_server, is_here, is_loopback, join_store, own_address, serve_store
from paceline.parallel.torch_internals import TCPStore

LAST_CALL_SECONDS = 3  # how long to wait for more hosts once the minimum has joined; later hosts cause a restart
KEEP_ALIVE_SECONDS, KEEP_ALIVE_ATTEMPTS = 1, 4  # a host that misses this many heartbeats counts as lost
STORE_SECONDS = 30


@dataclass(frozen=True)
class Rendezvous:
    """The values of `--nnodes`, `--rdzv`, `--max-restarts` and the timeouts; by default, a single host."""

    host: str = LOOPBACK
    port: int = 0
    min_hosts: int = 1
    max_hosts: int = 1
    max_restarts: int = 0
    timeout: float = 600.0
    join_timeout: float = 600.0

    @classmethod
    def of(cls, run: RunSettings) -> Rendezvous:
        """Return the rendezvous for a run's settings; raise UserError if they are inconsistent."""
        min_hosts, max_hosts = parse_nodes(run.nnodes)
        host, port = parse_endpoint(run.rdzv) if run.rdzv else (LOOPBACK, 0)
        if max_hosts > 1 and not run.rdzv:
            raise UserError(
                f"--nnodes {run.nnodes}: several hosts need a rendezvous; set --rdzv HOST:PORT, where HOST "
                "is one of these hosts"
            )
        if min_hosts < max_hosts and "/" in run.batch_size:
            raise UserError(
                f"--batch-size {run.batch_size}: with --nnodes {run.nnodes}, the number of devices may change; "
                "set --batch-size to the total across all devices"
            )
        try:
            own_address(host)
        except (OSError, UnicodeError) as error:
            raise UserError(f"--rdzv {run.rdzv}: {getattr(error, 'strerror', 'not a host name') or error}") from None
        return cls(host, port, min_hosts, max_hosts, run.max_restarts, run.timeout, run.join_timeout)

    @property
    def endpoint(self) -> str:
        """The address as shown in messages."""
        return f"{self.host}:{self.port}"

    def open(self) -> DynamicRendezvousHandler:
        """Serve the rendezvous if its address is this host's, else wait until it is reachable; return its handler."""
        # The host's name may resolve to a loopback address, as in Debian's /etc/hosts.
        is_loopback_only = self.max_hosts > 1 and is_loopback(self.host)
        store = self._store(serves_all=is_loopback_only)
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=self.endpoint,
            run_id="paceline",
            min_nodes=self.min_hosts,
            max_nodes=self.max_hosts,
            local_addr=None if is_loopback_only else own_address(self.host),
            join_timeout=max(1, round(self.join_timeout)),
            last_call_timeout=LAST_CALL_SECONDS,
            close_timeout=STORE_SECONDS,
            keep_alive_interval=KEEP_ALIVE_SECONDS,
            keep_alive_max_attempt=KEEP_ALIVE_ATTEMPTS,
        )
        return create_handler(store, C10dRendezvousBackend(store, parameters.run_id), parameters)

    def _store(self, *, serves_all: bool) -> TCPStore:
        timeout = timedelta(seconds=STORE_SECONDS)
        if is_here(self.host):
            try:
                served: TCPStore = serve_store(self.host, self.port, timeout, on_all=serves_all)
                return served
            except OSError:  # another process on this host serves the rendezvous
                if self.max_hosts == 1:
                    raise
        try:
            await_server(self.host, self.port, self.join_timeout)
        except OSError as error:
            raise RendezvousTimeoutError(f"{error.strerror or error}") from None
        joined: TCPStore = join_store(self.host, self.port, timeout)
        return joined


def parse_nodes(text: str) -> tuple[int, int]:
    """Parse `2` as (2, 2) and `1:4` as (1, 4)."""
    low, colon, high = text.partition(":")
    if not low.isdecimal() or (colon and not high.isdecimal()):
        raise UserError(f"--nnodes {text}: expected the number of hosts, or MIN:MAX like 1:4")
    numbers = int(low), int(high or low)
    if not 1 <= numbers[0] <= numbers[1]:
        raise UserError(f"--nnodes {text}: the minimum must be at least 1 and at most the maximum")
    return numbers


def parse_endpoint(text: str) -> tuple[str, int]:
    """Split `HOST:PORT` into host and port; an IPv6 address is in brackets."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 1024 <= int(port) < 65536:
        raise UserError(f"--rdzv {text}: expected HOST:PORT, with a port from 1024 to 65535")
    return host, int(port)
