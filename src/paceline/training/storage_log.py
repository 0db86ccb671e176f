"""Follows the memory of every tensor that is created while the log is active, real or fake."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.parallel.torch_internals import FakeTensor, TorchDispatchMode, has_no_result

BLOCK_BYTES = 512  # the CUDA allocator rounds every size up to a multiple of this


class Kind(StrEnum):
    """What memory is used for."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    EMA = "EMA"
    ACTIVATIONS = "activations"
    BATCH = "batch"
    BUFFERS = "buffers"
    GRAPHS = "CUDA graphs"


class Column(NamedTuple):
    """What memory is used for, and for which network; the name is empty if it belongs to no network."""

    kind: Kind
    network: str = ""


class Timeline(NamedTuple):
    """The live bytes after each allocation, and the phase in which it was made."""

    columns: tuple[Column, ...]
    live: NDArray[np.float64]  # [allocations, columns]
    phases: tuple[str, ...]  # one per allocation


class _Storage(NamedTuple):
    alive: weakref.ref[torch.UntypedStorage]
    size: int
    column: Column
    since: int  # the row of the timeline that includes it first


class StorageLog(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Counts the live bytes of all tensors on one device by column. New tensors count as activations."""

    def __init__(self, device: torch.device, *, is_fake: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.device, self.is_fake = device, is_fake
        self.live: dict[Column, int] = {}
        self.phase = ""
        self._storages: dict[int, _Storage] = {}
        self._rows: list[tuple[str, tuple[int, ...]]] = []
        self._moves: list[tuple[int, int, Column, int]] = []  # corrections of the rows [start, end)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_fake and has_no_result(func):
            return None  # fused optimizers have no implementation for fake tensors
        for tensor in _tensors(args):
            self._find(tensor)
        result = func(*args, **(kwargs or {}))
        self.mark(_tensors(result), Column(Kind.ACTIVATIONS), only_new=True)
        return result

    def _find(self, tensor: Tensor) -> None:
        """Count a tensor that was created before the log was active as a buffer, from the start of the timeline."""
        if self.is_fake and self.device.type == "cpu" and not isinstance(tensor, FakeTensor):
            return  # frozen weights that were read from a file: their fake copies are counted
        if tensor.device == self.device and id(storage := tensor.untyped_storage()) not in self._storages:
            column = Column(Kind.BUFFERS)
            self._count(storage, column)
            self._moves.append((0, len(self._rows), column, self._storages[id(storage)].size))

    def mark(self, tensors: Iterable[Tensor], column: Column, *, only_new: bool = False) -> None:
        """Count the memory of tensors in a column, from now on; with `only_new`, skip memory that is known."""
        changed = False
        for tensor in tensors:
            if tensor.device == self.device:
                storage = tensor.untyped_storage()
                if not (only_new and id(storage) in self._storages):
                    changed |= self._count(storage, column)
        if changed:
            self._rows.append((self.phase, tuple(self.live.values())))

    def relabel_remaining(self, old: Column, new: Column) -> None:
        """Move all memory of a column that is still in use to another column, from its allocation on."""
        for key, storage in list(self._storages.items()):
            if storage.column == old:
                self._add(old, -storage.size)
                self._storages[key] = storage._replace(column=new)
                self._add(new, storage.size)
                end = len(self._rows)
                self._moves += [(storage.since, end, old, -storage.size), (storage.since, end, new, storage.size)]

    def restart(self) -> None:
        """Forget the timeline so far; it starts again with the memory that is in use."""
        self._storages = {key: storage._replace(since=0) for key, storage in self._storages.items()}
        self._moves.clear()
        self._rows = [(self.phase, tuple(self.live.values()))]

    def timeline(self) -> Timeline:
        """Return the timeline since the last restart."""
        columns = tuple(self.live)
        live = np.zeros((len(self._rows), len(columns)))
        for number, (_, sizes) in enumerate(self._rows):
            live[number, : len(sizes)] = sizes  # columns are only ever appended
        for start, end, column, size in self._moves:
            live[start:end, columns.index(column)] += size
        return Timeline(columns, live, tuple(phase for phase, _ in self._rows))

    def _count(self, storage: torch.UntypedStorage, column: Column) -> bool:
        key, known = id(storage), self._storages.get(id(storage))
        if known:
            if known.column == column:
                return False
            self._add(known.column, -known.size)
            alive, size = known.alive, known.size
        else:
            alive, size = weakref.ref(storage, self._forgetter(key)), self._rounded(storage.nbytes())
        self._storages[key] = _Storage(alive, size, column, len(self._rows))
        self._add(column, size)
        return True

    def _forgetter(self, key: int) -> Callable[[object], None]:
        def forget(_: object) -> None:
            storage = self._storages.pop(key)
            self._add(storage.column, -storage.size)

        return forget

    def _add(self, column: Column, size: int) -> None:
        self.live[column] = self.live.get(column, 0) + size

    def _rounded(self, size: int) -> int:
        return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among the arguments or results of an operation."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
