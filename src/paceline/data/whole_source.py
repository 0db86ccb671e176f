"""Computes the size of a source in memory, and reads all of its samples in order."""

from __future__ import annotations

from collections.abc import Generator

from paceline.contracts.recipe import Batch
from paceline.data.source import Source, decodes, has_one_size
from paceline.data.tickets import in_order
from paceline.data.worker_pool import WorkerPool


def bytes_needed(source: Source) -> int:
    """Return the size of all decoded samples in bytes."""
    fields = source.read(0)
    if source.sizes is None:
        return len(source) * sum(field.nbytes for field in fields.values())
    needed = 0
    for name, field in fields.items():
        ratio = max(1, source.spec.scale) if name == "low" else 1
        pixels = int((source.sizes // ratio).prod(axis=1).sum())
        needed += pixels * field.shape[-1] * field.itemsize if field.ndim == 3 else len(source) * field.nbytes
    return needed


def read_in_order(
    source: Source, num_workers: int, bytes_per_batch: int, start: int = 0
) -> Generator[Batch, None, None]:
    """Yield all samples from `start` on, in batches with images [n, h, w, c].

    If image sizes differ, each batch has one sample. Worker processes prefetch if samples have to be decoded; close the
    generator to stop them early.
    """
    pool = WorkerPool(source, num_workers if decodes(source) else 0)
    rows = max(1, bytes_per_batch * len(source) // bytes_needed(source)) if has_one_size(source) else 1
    yield from pool.read(in_order(low, min(low + rows, len(source))) for low in range(start, len(source), rows))
