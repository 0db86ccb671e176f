"""What tells a source that is packed from another, and from itself before it was changed.

Samples in memory are hashed as they are. Of samples in files it is their names, numbers, and the sizes and times of
the files: a few pictures are decoded for it. Of other samples only reading tells; whoever writes reads them again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import numpy as np

from paceline.core.errors import UserError
from paceline.data.fingerprint import LOOKED_AT, fingerprint
from paceline.data.packing.format import Layout
from paceline.data.source import Source, lies_in_memory

DIFFERENCES = {  # in the order in which they are looked for
    "pictures": "its samples consist of other pictures",
    "numbers": "its samples have other numbers",
    "mixed": "its sizes are mixed, or were",
    "spec": "its data spec (size, channels, classes) differ",
    "names_sha256": "its samples have other names",
    "numbers_sha256": "its numbers (labels) differ",
    "files_sha256": "its files have other names, sizes or times of change",
    "fingerprint": "its pictures differ",
}


def describe(source: Source) -> dict[str, Any]:
    """What tells a split from another before it is packed, as JSON keeps it."""
    layout = Layout.of(source)
    found = {
        "count": len(source),
        "spec": dataclasses.asdict(source.spec),
        "mixed": source.sizes is not None,
        "pictures": layout.pictures,
        "numbers": list(layout.numbers),
        "names_sha256": _sha256_of_names(source),
        "numbers_sha256": _sha256_of_numbers(source, layout),
        "files_sha256": sha256_of_files(source),
        "fingerprint": fingerprint(source, LOOKED_AT),
    }
    return json.loads(json.dumps(found))


def difference(kept: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """In what the splits of a source are not those that were packed; "" where they are."""
    if list(kept) != list(found):
        return f"its splits are {', '.join(found)} instead of {', '.join(kept)}"
    for split in kept:
        before, now = kept[split], found[split]
        if before["count"] != now["count"]:
            return f"{split} has {now['count']:,} samples instead of {before['count']:,}"
        for key, what in DIFFERENCES.items():
            if before[key] != now[key]:
                return f"{split}: {what}"
    return ""


def only_reading_tells(source: Source) -> bool:
    """Whether it takes all of the source to see that nothing was changed in it."""
    return not lies_in_memory(source) and not _names_its_files(source)


def sha256_of_files(source: Source) -> str:
    """A hash of name, size and time of change of every file that samples are made of; "" where there are none."""
    if not _names_its_files(source):
        return ""
    digest = sha256()
    for index in range(len(source)):
        made_of = source.made_of(index)
        assert made_of is not None
        for name, path in made_of.files.items():
            try:
                status = path.stat()
            except OSError as error:
                raise UserError(f"{path}: {error.strerror}; it was there when its folder was listed") from error
            said = [name, path.name, status.st_size, status.st_mtime_ns]
            digest.update(f"{json.dumps(said)}\n".encode())
    return digest.hexdigest()


def _names_its_files(source: Source) -> bool:
    """Whether `made_of` can be relied on: a person's class that reads in its own way has to say it for itself."""
    made_of, read = (next(one for one in type(source).__mro__ if name in vars(one)) for name in ("made_of", "read"))
    if not issubclass(made_of, read) and not read.__module__.startswith("paceline."):
        return False
    first = source.made_of(0)
    return first is not None and set(Layout.of(source).numbers) <= first.numbers.keys()


def _sha256_of_names(source: Source) -> str:
    digest = sha256()
    for index in range(len(source)):
        digest.update(f"{json.dumps(source.name_of(index))}\n".encode())
    return digest.hexdigest()


def _sha256_of_numbers(source: Source, layout: Layout) -> str:
    if only_reading_tells(source) or not layout.numbers:
        return ""
    numbers = source.numbers_of(np.arange(len(source)))
    assert numbers is not None
    return sha256(np.stack([numbers[name] for name in layout.numbers], axis=1).astype(np.int64).tobytes()).hexdigest()
