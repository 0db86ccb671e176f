"""Fingerprints: short hashes of a source's images and labels, used to detect that the data has changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from paceline.data.source import Sample, Source, is_in_memory

FINGERPRINT_SAMPLES = 256  # number of samples to hash if the source is not in memory
FINGERPRINT_PIXELS = 16_000_000  # approximate limit on hashed pixels, for large images
STAT_THREADS, STAT_SAMPLES = 16, 256  # threads that look up files, and samples that a thread takes at a time
IDENTITY_SAMPLES = 16  # number of samples needed to distinguish two datasets
FILE_SIZES = "; file sizes "  # precedes the hash of all file sizes in a description
_Describe: TypeAlias = Callable[[str, Path, os.stat_result], object]
_known: WeakKeyDictionary[Source, dict[int, str]] = WeakKeyDictionary()  # cached for repeated evaluations
_known_files: WeakKeyDictionary[Source, str] = WeakKeyDictionary()


def describe_samples(source: Source) -> str:
    """Describe a source by its number of samples, a hash of its images and, if it has them, of its labels and files.

    Copies of the same data have the same description: of the files, only the sizes are hashed.
    """
    labels, sizes = _fingerprint_of_numbers(source, IDENTITY_SAMPLES), ""
    described = f"{len(source):,} samples, {fingerprint(source, IDENTITY_SAMPLES)}"
    with suppress(OSError, LookupError):  # a missing file is reported when it is read
        sizes = _sha256_of_files(source, lambda name, path, status: status.st_size)
    return described + (f" with labels {labels}" if labels else "") + (f"{FILE_SIZES}{sizes[:16]}" if sizes else "")


def is_same_data(before: str, now: str) -> bool:
    """Return whether two descriptions of samples agree; those of older versions lack the file sizes."""
    sizes = [described.partition(FILE_SIZES)[2] for described in (before, now)]
    return without_sizes(before) == without_sizes(now) and (not all(sizes) or sizes[0] == sizes[1])


def without_sizes(described: str) -> str:
    """Return a description of samples as older versions wrote it."""
    return described.partition(FILE_SIZES)[0]


def fingerprint(source: Source, samples: int = FINGERPRINT_SAMPLES) -> str:
    """Return a hash of the image count and the images' pixels.

    If the images are in memory, all of them are hashed; otherwise, only some, evenly spaced.
    """
    known = _known.setdefault(source, {})
    if samples not in known:
        known[samples] = _fingerprint_of_images(source, samples)
    return known[samples]


def fingerprint_of_files(source: Source) -> str:
    """Return a hash of every image's stored checksum, or of its file's name, size and modification time; "" if neither.

    Unlike `fingerprint`, it changes if any image changes, but it can differ between copies of the same data.
    """
    if source not in _known_files:
        checksums = source.checksums_of(np.arange(len(source)))
        if checksums is not None:
            _known_files[source] = sha256(np.ascontiguousarray(checksums).tobytes()).hexdigest()
        else:
            with suppress(OSError, LookupError):  # a missing file is reported when it is read
                _known_files[source] = sha256_of_stats(source)
    return _known_files.get(source, "")


def sha256_of_stats(source: Source) -> str:
    """Return a hash of the name, size and modification time of every sample's files; "" if there are no files.

    Raise OSError if a file is missing, and LookupError if only some samples have files.
    """
    return _sha256_of_files(source, lambda name, path, status: [name, path.name, status.st_size, status.st_mtime_ns])


def _sha256_of_files(source: Source, describe: _Describe) -> str:
    if source.files_of(0) is None:
        return ""
    parts = np.array_split(np.arange(len(source)), -(-len(source) // STAT_SAMPLES))
    digest = sha256()
    with ThreadPoolExecutor(STAT_THREADS) as threads:  # in a network file system, each call takes milliseconds
        for lines in threads.map(lambda indices: _stats_of(source, indices, describe), parts):
            digest.update(lines)
    return digest.hexdigest()


def _stats_of(source: Source, indices: NDArray[np.int64], describe: _Describe) -> bytes:
    lines = []
    for index in indices.tolist():
        sample = source.files_of(index)
        if sample is None:
            raise LookupError(f"{source.name_of(index)}: is not in a file of its own, unlike other samples")
        for name, path in sample.files.items():
            lines.append(f"{json.dumps(describe(name, path, path.stat()))}\n")
    return "".join(lines).encode()


def _fingerprint_of_images(source: Source, samples: int) -> str:
    count = len(source) if is_in_memory(source) else min(len(source), samples)
    digest = sha256(str(len(source)).encode())
    parts: Iterable[Sample]
    if source.sizes is None:
        indices = np.array_split(_evenly_spaced(source, count), -(-count // 1024))
        parts = map(source.read_many, indices)
    else:
        digest.update(np.ascontiguousarray(source.sizes).tobytes())
        count = max(1, min(count, int(FINGERPRINT_PIXELS / source.sizes.prod(axis=1).mean())))
        parts = map(source.read, _evenly_spaced(source, count).tolist())
    for part in parts:
        for field in (field for field in part.values() if field.ndim >= 3):
            digest.update(np.ascontiguousarray(field).tobytes())
    return digest.hexdigest()[:32]


def _fingerprint_of_numbers(source: Source, samples: int) -> str:
    """Return a hash of all labels, or of some if getting them requires `read`; "" if there are no labels."""
    first = source.read(0)
    names = sorted(name for name, field in first.items() if field.ndim == 0)
    if not names:
        return ""
    numbers = source.numbers_of(np.arange(len(source)))
    if numbers is None or not set(names) <= numbers.keys():
        read = [source.read(int(index)) for index in _evenly_spaced(source, min(len(source), samples))]
        numbers = {name: np.array([sample[name] for sample in read]) for name in names}
    digest = sha256()
    for name in names:
        digest.update(name.encode())
        digest.update(numbers[name].astype(np.int64).tobytes())
    return digest.hexdigest()[:16]


def _evenly_spaced(source: Source, count: int) -> NDArray[np.int64]:
    return np.linspace(0, len(source) - 1, count).round().astype(np.int64)
