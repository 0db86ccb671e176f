"""Check that a source returns samples in the documented format."""

from __future__ import annotations

import numpy as np

from paceline.core.errors import UserError
from paceline.data.source import Source
from paceline.data.subset import decodes


def check_split(source: Source, split: str, name: str) -> None:
    """Raise UserError if the first sample or the classes of a split are wrong; the message starts with `name`."""
    check_sample(source, f"{name}: sample 0 of split {split!r}")
    check_classes(source, f"{name}: split {split!r}")


def check_sample(source: Source, what: str) -> None:
    """Raise UserError if the first sample has a format that is not allowed; the message starts with `what`."""
    if not len(source):
        return
    sample = source.read(0)
    if not isinstance(sample, dict):
        raise UserError(f"{what}: is of type {type(sample).__name__}: return a dict {{name: array}}")
    for name, value in sample.items():
        if not isinstance(value, (np.ndarray, np.generic)):
            raise UserError(f"{what}: {name!r} is of type {type(value).__name__}: return a NumPy array or number")
        array = np.asarray(value)
        found = f"{what}: {name!r} is a {array.dtype} array of shape {list(array.shape)}"
        if (name == "image" or array.ndim == 3) and (array.dtype != source.spec.dtype or array.ndim != 3):
            raise UserError(
                f"{found}: return a {source.spec.dtype} [height, width, channels] array (spec.dtype is the data type)"
            )
        if name == "image" and array.shape[2] != source.spec.channels == array.shape[0]:
            raise UserError(f"{found}: its channels come first; return it with channels last: image.transpose(1, 2, 0)")
        if name == "image" and array.shape[2] != source.spec.channels:
            raise UserError(f"{found}, but spec.channels is {source.spec.channels}; set it to {array.shape[2]}")
        if name == "label" and (array.dtype != np.int64 or array.ndim):
            raise UserError(f"{found}: return a single int64 number")


def check_classes(source: Source, what: str) -> None:
    """Raise UserError if class names or labels do not match `spec.num_classes`; the message starts with `what`.

    If samples have to be decoded, only the first label is checked.
    """
    names, num_classes = source.spec.class_names, source.spec.num_classes
    if names and len(names) != num_classes:
        what = f"{what}: spec.num_classes is {num_classes}, but there are {len(names)} class names"
        raise UserError(f"{what}; use one name per class")
    if not num_classes or not len(source):
        return
    found = None if decodes(source) else source.numbers_of(np.arange(len(source)))
    labels = np.atleast_1d((found or source.read(0)).get("label", np.int64(0)))
    wrong = labels[(labels < 0) | (labels >= num_classes)]
    if len(wrong):
        raise UserError(
            f"{what}: a label is {wrong[0]}, but spec.num_classes is {num_classes}; "
            f"labels must be from 0 to {num_classes - 1}"
        )
