"""Detects whether a packed folder was made from a given source, and whether the source has changed since then.

If the samples are in memory, all of them are hashed. If they are in files, the hash covers their names and numbers, the
sizes and modification times of the files, and the pixels of a few images. In any other source, changes can only be
detected by reading all samples; the writer does that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256

import numpy as np

from paceline.core.errors import UserError
from paceline.data.fingerprint import IDENTITY_SAMPLES, fingerprint, sha256_of_stats
from paceline.data.packing.manifest import Layout, SplitRecord
from paceline.data.source import Source
from paceline.data.subset import is_in_memory


def describe(source: Source) -> SplitRecord:
    """Return the properties that identify a split, before it is packed."""
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
        groups_sha256=sha256(json.dumps(source.groups).encode()).hexdigest() if source.groups else "",
    )


def difference(kept: Mapping[str, SplitRecord], found: Mapping[str, SplitRecord]) -> str:
    """Describe how a source's splits differ from those that were packed; "" if they do not differ."""
    if list(kept) != list(found):
        return f"the splits are {', '.join(found)} instead of {', '.join(kept)}"
    for split, before in kept.items():
        now = found[split]
        if before.count != now.count:
            return f"{split} has {now.count:,} samples instead of {before.count:,}"
        differences = {  # possible differences, checked in this order
            "the samples have different image fields": before.images != now.images,
            "the samples have different label fields": before.numbers != now.numbers,
            "the images had one size and now have several, or vice versa": before.mixed != now.mixed,
            "the data spec (size, channels, classes) differs": before.spec != now.spec,
            "the samples are grouped differently (group_by)": before.groups_sha256 != now.groups_sha256,
            "the samples have different names": before.names_sha256 != now.names_sha256,
            "the labels differ": before.numbers_sha256 != now.numbers_sha256,
            "the files have different names, sizes or modification times": before.files_sha256 != now.files_sha256,
            "the images differ": before.fingerprint != now.fingerprint,
        }
        for what, differs in differences.items():
            if differs:
                return f"{split}: {what}"
    return ""


def must_be_read(source: Source) -> bool:
    """Return whether changes in the source can only be detected by reading all of it."""
    return not is_in_memory(source) and not _lists_its_files(source)


def sha256_of_files(source: Source) -> str:
    """Return a hash of the name, size and modification time of every sample's files; "" if there are no files."""
    if not _lists_its_files(source):
        return ""
    try:
        return sha256_of_stats(source)
    except OSError as error:
        raise UserError(
            f"{error.filename}: {error.strerror}; the file was removed or changed during packing; pack again"
        ) from error


def _lists_its_files(source: Source) -> bool:
    """Return whether `files_of` is reliable; it is not if a user's class overrides only `read`."""
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
