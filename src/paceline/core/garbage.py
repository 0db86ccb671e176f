"""Makes garbage collection rarer while modules are imported or networks are traced."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NUM_NEW_OBJECTS = 100_000  # before a collection; Python's default is at most 2,000


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Collect garbage rarely inside the block, which creates many objects that all stay in use.

    Python would otherwise examine all existing objects again and again, which takes up to a fifth of the time.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(NUM_NEW_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
