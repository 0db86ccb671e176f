"""What distinguishes a source that is packed from another, and from itself before it was changed.

Samples in memory are hashed as they are. For samples in files, names, numbers, and the sizes and times of the files are
hashed, and a few images are decoded. Other samples must be read; the writer reads them again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256

import numpy as np

from paceline.core.errors import UserError
from paceline.data.fingerprint import IDENTITY_SAMPLES, fingerprint
from paceline.data.packing.manifest import Layout, SplitRecord
from paceline.data.source import Source, is_in_memory


def describe(source: Source) -> SplitRecord:
    """Return what distinguishes a split from others, before it is packed."""
    layout = Layout.of(source)
    return SplitRecord(
        count=len(source),
        spec=source.spec,
        mixed=source.sizes is not None,
        images=layout.images,
        numbers=layout.numbers,
        names_sha256=_sha256_of_names(source),
        numbers_sha256=_sha256_of_numbers(source, layout),
        files_sha256=sha256_of_files(source),
        fingerprint=fingerprint(source, IDENTITY_SAMPLES),
    )


def difference(kept: Mapping[str, SplitRecord], found: Mapping[str, SplitRecord]) -> str:
    """Return in what the splits of a source are not those that were packed; "" where they are."""
    if list(kept) != list(found):
        return f"its splits are {', '.join(found)} instead of {', '.join(kept)}"
    for split, before in kept.items():
        now = found[split]
        if before.count != now.count:
            return f"{split} has {now.count:,} samples instead of {before.count:,}"
        differences = {  # in the order in which they are checked
            "its samples consist of other images": before.images != now.images,
            "its samples have other numbers": before.numbers != now.numbers,
            "its sizes are mixed, or were": before.mixed != now.mixed,
            "its data spec (size, channels, classes) differs": before.spec != now.spec,
            "its samples have other names": before.names_sha256 != now.names_sha256,
            "its numbers (labels) differ": before.numbers_sha256 != now.numbers_sha256,
            "its files have other names, sizes or times of change": before.files_sha256 != now.files_sha256,
            "its images differ": before.fingerprint != now.fingerprint,
        }
        for what, differs in differences.items():
            if differs:
                return f"{split}: {what}"
    return ""


def must_be_read(source: Source) -> bool:
    """Return whether all of the source must be read to see that nothing was changed in it."""
    return not is_in_memory(source) and not _lists_its_files(source)


def sha256_of_files(source: Source) -> str:
    """Return a hash of name, size and time of change of every file of the samples; "" where there are none."""
    if not _lists_its_files(source):
        return ""
    digest = sha256()
    for index in range(len(source)):
        sample = source.files_of(index)
        assert sample is not None
        for name, path in sample.files.items():
            try:
                status = path.stat()
            except OSError as error:
                raise UserError(f"{path}: {error.strerror}; it was there when its folder was listed") from error
            stat = [name, path.name, status.st_size, status.st_mtime_ns]
            digest.update(f"{json.dumps(stat)}\n".encode())
    return digest.hexdigest()


def _lists_its_files(source: Source) -> bool:
    """Return whether `files_of` can be relied on: a user's class that overrides `read` alone may read other files."""
    lister, reader = (next(one for one in type(source).__mro__ if name in vars(one)) for name in ("files_of", "read"))
    if not issubclass(lister, reader) and not reader.__module__.startswith("paceline."):
        return False
    first = source.files_of(0)
    return first is not None and set(Layout.of(source).numbers) <= first.numbers.keys()


def _sha256_of_names(source: Source) -> str:
    digest = sha256()
    for index in range(len(source)):
        digest.update(f"{json.dumps(source.name_of(index))}\n".encode())
    return digest.hexdigest()


def _sha256_of_numbers(source: Source, layout: Layout) -> str:
    if must_be_read(source) or not layout.numbers:
        return ""
    numbers = source.numbers_of(np.arange(len(source)))
    assert numbers is not None
    return sha256(np.stack([numbers[name] for name in layout.numbers], axis=1).astype(np.int64).tobytes()).hexdigest()
