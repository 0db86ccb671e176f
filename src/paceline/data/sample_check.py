"""Check that a source returns samples in the documented format."""

from __future__ import annotations

import numpy as np

from paceline.core.errors import UserError
from paceline.data.source import Source

LABELS = (np.dtype(np.int64), np.dtype(np.uint8))  # label types that torch's loss functions accept


def check_sample(source: Source, what: str) -> None:
    """Raise UserError if the first sample has a format that is not allowed; the message starts with `what`."""
    if not len(source):
        return
    for name, value in source.read(0).items():
        array = np.asarray(value)
        found = f"{what}: {name!r} is a {array.dtype} array of shape {list(array.shape)}"
        if (name == "image" or array.ndim == 3) and (array.dtype != source.spec.dtype or array.ndim != 3):
            raise UserError(
                f"{found}: return a {source.spec.dtype} [height, width, channels] array (spec.dtype is the data type)"
            )
        if name == "image" and array.shape[2] != source.spec.channels:
            raise UserError(f"{found}, but spec.channels is {source.spec.channels}; set it to {array.shape[2]}")
        if name == "label" and (array.dtype not in LABELS or array.ndim):
            raise UserError(f"{found}: return a single int64 number")
