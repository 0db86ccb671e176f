"""The addresses on which a process listens, read from /proc."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path


def listeners(pid: int) -> set[tuple[str, int]]:
    """Return the addresses and ports on which a process listens."""
    sockets, found = set(), set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the process has closed the file in the meantime
            sockets.add(link.readlink().name)
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = row.split()
            if state == "0A" and f"socket:[{rest[5]}]" in sockets:
                address, port = local.split(":")
                words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                found.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found
