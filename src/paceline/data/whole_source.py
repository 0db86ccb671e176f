"""Computes the size of a source in memory, and reads all of its samples in order, in several processes."""

from __future__ import annotations

from collections.abc import Generator

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch
from paceline.core.ordered_map import num_cores
from paceline.data.source import Source, has_one_size
from paceline.data.subset import decodes
from paceline.data.tickets import in_order
from paceline.data.worker_pool import BATCHES_PER_WORKER, WorkerPool

BYTES_WAITING = 256 * 2**20  # maximum size of the samples that worker processes have read ahead, for any number of them
MAX_READERS = 16
LARGE_BYTES_WAITING = 2**30  # the same for samples so large that a batch has only one; fewer processes read them


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


def num_readers(settings: RunSettings) -> int:
    """Return how many processes or threads read files at the start of a run: this process's share of the cores.

    Training does not run yet, so `workers`, which must leave cores for training, is only the minimum. With `workers=0`,
    everything is read in this process.
    """
    if not settings.workers:
        return 0
    return max(settings.workers, min(MAX_READERS, num_cores() // max(1, settings.devices)))


def read_in_order(
    source: Source, num_workers: int, bytes_per_batch: int, start: int = 0
) -> Generator[Batch, None, None]:
    """Yield all samples from `start` on, in batches with images [n, h, w, c].

    If image sizes differ, each batch has one sample. Worker processes prefetch if samples have to be decoded; close the
    generator to stop them early. `bytes_per_batch` is reduced for many workers, and the number of workers for large
    samples, so that they do not need more memory.
    """
    num_workers = num_workers if decodes(source) else 0
    needed = bytes_needed(source)
    if num_workers:
        num_workers = max(1, min(num_workers, LARGE_BYTES_WAITING // (BATCHES_PER_WORKER * _largest(source, needed))))
        bytes_per_batch = min(bytes_per_batch, BYTES_WAITING // (num_workers * BATCHES_PER_WORKER))
    pool = WorkerPool(source, num_workers)
    rows = max(1, bytes_per_batch * len(source) // needed) if has_one_size(source) else 1
    yield from pool.read(in_order(low, min(low + rows, len(source))) for low in range(start, len(source), rows))


def _largest(source: Source, needed: int) -> int:
    """Return the approximate size of the largest sample in bytes."""
    if source.sizes is None:
        return max(1, needed // len(source))
    pixels = source.sizes.prod(axis=1)
    return max(1, int(needed * (pixels.max() / pixels.sum())))
