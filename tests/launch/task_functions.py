"""Functions that the tests run in worker processes."""

from __future__ import annotations

import os
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


def outer() -> object:
    """Return a nested function, which other processes cannot import."""

    def inner(config: Config) -> None: ...

    return inner
