"""What tells the samples of a run from others, in short: a hash of pictures, and one of labels where there are some."""

from __future__ import annotations

from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from paceline.data.source import Sample, Source, lies_in_memory

FINGERPRINT_SAMPLES = 256  # read for a fingerprint where reading costs
FINGERPRINT_PIXELS = 16_000_000  # of large pictures fewer are read
LOOKED_AT = 16  # samples that are enough to tell one data set from another
LABELS = " with labels "
_found: WeakKeyDictionary[Source, dict[int, str]] = WeakKeyDictionary()  # a run asks again at every evaluation


def describe_samples(source: Source) -> str:
    """How many samples there are, and hashes of what tells them from others."""
    labels = _fingerprint_of_numbers(source, LOOKED_AT)
    return f"{len(source):,} samples, {fingerprint(source, LOOKED_AT)}" + (f"{LABELS}{labels}" if labels else "")


def without_labels(described: str) -> str:
    """A description as all runs have it: earlier versions said nothing of labels."""
    return described.partition(LABELS)[0]


def are_same(one: str, other: str) -> bool:
    """Whether two descriptions are of the same samples; labels count where both speak of them."""
    if LABELS in one and LABELS in other:
        return one == other
    return without_labels(one) == without_labels(other)


def fingerprint(source: Source, samples: int = FINGERPRINT_SAMPLES) -> str:
    """A hash of the pictures: of all that lie in memory, else of some spread over the source, and of their number."""
    found = _found.setdefault(source, {})
    if samples not in found:
        found[samples] = _fingerprint_of_pictures(source, samples)
    return found[samples]


def _fingerprint_of_pictures(source: Source, samples: int) -> str:
    wanted = len(source) if lies_in_memory(source) else min(len(source), samples)
    digest = sha256(str(len(source)).encode())
    if source.sizes is not None:
        digest.update(np.ascontiguousarray(source.sizes).tobytes())
        wanted = max(1, min(wanted, int(FINGERPRINT_PIXELS / source.sizes.prod(axis=1).mean())))
        for index in _spread(source, wanted):
            _add_pictures(digest, source.read(int(index)))
        return digest.hexdigest()[:32]
    for indices in np.array_split(_spread(source, wanted), -(-wanted // 1024)):
        _add_pictures(digest, source.read_many(indices))
    return digest.hexdigest()[:32]


def _fingerprint_of_numbers(source: Source, samples: int) -> str:
    """A hash of the labels, of all that are known without reading pictures, else of some; "" where there are none."""
    first = source.read(0)
    names = sorted(name for name, field in first.items() if field.ndim == 0)
    if not names:
        return ""
    numbers = source.numbers_of(np.arange(len(source)))
    if numbers is None or not set(names) <= numbers.keys():
        read = [source.read(int(index)) for index in _spread(source, min(len(source), samples))]
        numbers = {name: np.array([sample[name] for sample in read]) for name in names}
    digest = sha256()
    for name in names:
        digest.update(name.encode())
        digest.update(numbers[name].astype(np.int64).tobytes())
    return digest.hexdigest()[:16]


def _spread(source: Source, wanted: int) -> np.ndarray:
    return np.linspace(0, len(source) - 1, wanted).round().astype(np.int64)


def _add_pictures(digest: Any, sample: Sample) -> None:
    for field in (field for field in sample.values() if field.ndim >= 3):
        digest.update(np.ascontiguousarray(field).tobytes())
