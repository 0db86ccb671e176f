"""Separate the wait for slower ranks from communication: compare the same collectives in the traces of all ranks.

All ranks leave a collective at about the same time, but the last one to arrive does not wait. Its time in the
collective is the time for communication, and the other ranks wait for the rest of their time.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence

import torch.distributed as dist

from paceline.parallel.torch_internals import group_store
from paceline.parallel.world import World
from paceline.training.trace import Collective, TraceTimes

KEY = "profile/"  # prefix of the keys in the process group's store
EXCHANGE_SECONDS = 60.0  # how long rank 0 waits for the collectives of the other ranks
POLL_SECONDS = 0.1


def publish(world: World, collectives: Sequence[Collective]) -> None:
    """Send the collectives in the trace of this rank to rank 0; empty if there is no trace.

    This uses the store of the process group, because a thread must not run collectives.
    """
    if world.size > 1 and not world.is_first:
        try:
            group_store().set(f"{KEY}{world.rank}", json.dumps(collectives))
        except dist.DistError:  # rank 0, which serves the store, has ended
            return


def receive(world: World) -> list[list[Collective]]:
    """Return the collectives that each rank except rank 0 has published; empty for ranks that have not."""
    until = time.monotonic() + EXCHANGE_SECONDS
    received = []
    for rank in range(1, world.size):
        text = _read(f"{KEY}{rank}", until)
        received.append([Collective(*one) for one in json.loads(text)])
    return received


def _read(key: str, until: float) -> str:
    try:
        store = group_store()
        while not store.check([key]):
            if time.monotonic() > until:
                return "[]"
            time.sleep(POLL_SECONDS)
        return bytes(store.get(key)).decode()
    except dist.DistError:
        return "[]"


def waits_by_rank(own: TraceTimes, others: Sequence[Sequence[Collective]]) -> dict[int, float]:
    """Return the seconds that rank 0 waits for each other rank, and in entry 0, that the others wait for rank 0.

    Only waits that delay a step are counted. `own` are the times of rank 0. Other ranks trace fewer steps, so their
    waits are extrapolated.
    """
    ranks = [_numbered(one) for one in (own.collectives, *others)]
    compared = set.intersection(*(set(one) for one in ranks))
    waits: dict[int, float] = defaultdict(float)
    for key in compared:
        found = [one[key] for one in ranks]
        shortest = min(one.seconds for one in found)
        last = next(rank for rank, one in enumerate(found) if one.seconds == shortest)
        waited = [min(one.seconds - shortest, one.exposed) for one in found]
        waits[last] += waited[0] if last else statistics.median(waited[1:])
    scale = own.num_collectives / max(len(compared), 1)
    return {rank: scale * seconds for rank, seconds in sorted(waits.items()) if seconds}


def _numbered(collectives: Sequence[Collective]) -> dict[tuple[str, int], Collective]:
    """Return collectives by name and occurrence: two that run at the same time may start in any order."""
    seen: Counter[str] = Counter()
    numbered = {}
    for one in collectives:
        numbered[one.name, seen[one.name]] = one
        seen[one.name] += 1
    return numbered
