"""Functions that the tests run in worker processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

from paceline.config.resolve import Config
from paceline.core.errors import UserError
from paceline.parallel.world import join


def note_sum(config: Config, folder: str, numbers: list[int], *, word: str) -> None:
    """Write the arguments, the ranks and the seed to one file per process."""
    world = join(config.run, distributed=True)
    words = world.gather_strings(str(world.rank))
    (Path(folder) / f"rank-{world.rank}").write_text(f"{word} {sum(numbers)} of {','.join(words)} {config.run.seed}")
    world.leave()


def end_with(config: Config, code: int) -> int:
    """Exit every process with the given code."""
    return code


def raise_user_error(config: Config, rank: int) -> None:
    """Raise a user error in the process with the given rank while all other processes wait."""
    world = join(config.run, distributed=True)
    try:
        if world.rank == rank:
            raise UserError(f"--data {os.getpid()}: is of no use; give another")
        world.wait_for_all()
    finally:
        world.abandon()


def interrupt_one(config: Config, folder: str) -> None:
    """Interrupt rank 1 while the other ranks wait for it, for half a minute, without noticing a Ctrl-C."""
    if os.environ["RANK"] == "1":
        raise KeyboardInterrupt
    time.sleep(30)
    (Path(folder) / "waited in vain").touch()


def outer() -> object:
    """Return a nested function, which other processes cannot import."""

    def inner(config: Config) -> None: ...

    return inner
