"""What the processes of a run agree on as they start: who writes where, and which checkpoint they go on from.

Hosts need no common disk. The first process of each host writes the run's folder that it sees, once where several
hosts see the same one; so whatever host is lost, the others hold the run. Each looks for its newest whole
checkpoint, and who holds the newest of all sends it to the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch

from paceline.core.errors import UserError
from paceline.core.files import write_file
from paceline.parallel.world import World
from paceline.runs.checkpoint import Damaged, load
from paceline.runs.data_spec_file import DATA_SPEC
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import METRICS
from paceline.runs.snapshot import Snapshot

Held = TypeVar("Held")


def claim_folder(folder: RunFolder, world: World, check: Callable[[], None]) -> None:
    """Makes a process of each host that has a folder of its own the writer of it; one's mistake is told by all."""

    def claim() -> None:
        folder.check_free()
        folder.claim()
        check()

    several = world.place.num_nodes > 1
    # A name that nobody has asked for before: a network file system then has no old answer at hand.
    sign = folder.path / f".meeting-{world.share(os.urandom(8).hex())}" if several else None
    _together(world, claim if world.is_first else None)
    if sign is None:
        return
    if world.is_first:
        sign.touch()
    world.wait_for_all()
    claims = world.place.local_rank == 0 and not world.is_first and not sign.exists()
    _together(world, claim if claims else None)
    if world.is_first:
        sign.unlink()


def newest_snapshot(folder: RunFolder, world: World, report: Callable[[str], None]) -> Snapshot | None:
    """The newest whole checkpoint that any host holds, on every process and in every host's folder."""
    own: Snapshot | None = None
    damage = ""
    if folder.is_mine:
        try:
            own = folder.checkpoints.latest(report)
        except UserError as error:
            damage = str(error)
    snapshot, holder = from_holder(world, own, own.images if own else -1)
    if snapshot is None:
        tell(world, damage)
        return None
    if world.place.num_nodes > 1:
        _catch_up(folder, world, snapshot, holder)
        if holder and world.is_first:
            report(f"the checkpoint at {snapshot.images:,} images comes from the host of rank {holder}")
    if folder.is_mine:
        folder.checkpoints.drop_after(snapshot.images)
    return snapshot


def checkpoint_at(folder: RunFolder, world: World, images: int) -> Snapshot | None:
    """One checkpoint on every process, from a host that holds it; None where none does."""
    own: Snapshot | None = None
    if folder.is_mine:
        try:
            own = load(folder.checkpoints.path(images))
        except Damaged:
            if world.place.num_nodes == 1:
                raise
    return from_holder(world, own, -1 if own is None else images)[0]


def from_holder(world: World, own: Held | None, images: int) -> tuple[Held | None, int]:
    """What the process holds that has seen the most images, on each, and its rank; None where all have -1."""
    held = world.gather(torch.tensor([images], device=world.device)).flatten()
    holder = int(held.argmax())
    return (world.share(own, holder) if held[holder] >= 0 else None), holder  # type: ignore[return-value]


def _catch_up(folder: RunFolder, world: World, snapshot: Snapshot, holder: int) -> None:
    """Gives the hosts that were away the checkpoint, the best one before it, and metrics and record that led to it."""
    best_images = snapshot.best_images
    best = checkpoint_at(folder, world, best_images) if best_images < snapshot.images else None
    files = (folder.path / METRICS, folder.config_file, folder.path / DATA_SPEC, folder.protocols_file)
    held = [file.read_bytes() if file.exists() else b"" for file in files] if world.rank == holder else []
    history = world.share(held, holder)
    if folder.is_mine and world.rank != holder:  # the record first: no checkpoint is without its settings
        for file, content in zip(files, history, strict=True):  # type: ignore[call-overload]
            if content:
                write_file(file, content)
    if folder.is_mine and best:
        folder.checkpoints.save(best)
    if folder.is_mine and world.rank != holder:
        folder.checkpoints.save(snapshot)
    world.wait_for_all()


def _together(world: World, work: Callable[[], None] | None) -> None:
    """Does some processes' work; if one meets a person's mistake, all end with it."""
    mistake = ""
    if work:
        try:
            work()
        except UserError as error:
            mistake = str(error)
    tell(world, mistake)


def tell(world: World, mistake: str) -> None:
    """Ends all processes with a person's mistake that one of them met, if one did."""
    for told in world.collect(mistake):
        if told:
            raise UserError(told)
