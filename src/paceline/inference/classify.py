"""Classifies image files in batches, and writes the classes as CSV or JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from paceline.core.ordered_map import num_cores, ordered_map
from paceline.images.decode import BadImage
from paceline.images.readers import ImageReader, image_size
from paceline.inference.files import FoundImage, SkippedImage
from paceline.inference.model import Model

SUFFIXES = (".csv", ".jsonl")


class ClassProbability(NamedTuple):
    """A class, and the probability that an image shows it."""

    name: str
    probability: float


@contextmanager
def prediction_file(path: Path, suffix: str, top: int) -> Iterator[Callable[[str, Sequence[ClassProbability]], None]]:
    """Open a file in the format given by a suffix, and yield a function that adds an image with its likeliest classes.

    Bytes of a file name that are not UTF-8 stay bytes in a table; in JSON, they are escaped.
    """
    errors = "surrogateescape" if suffix == ".csv" else "backslashreplace"
    with path.open("w", newline="", encoding="utf-8", errors=errors) as file:
        table = csv.writer(file)
        if suffix == ".csv":
            table.writerow(["file", *(f"{what}_{n}" for n in range(1, top + 1) for what in ("class", "probability"))])

        def write(image: str, classes: Sequence[ClassProbability]) -> None:
            if suffix == ".csv":
                table.writerow([image, *chain.from_iterable(classes)])
            else:
                listed = [{"class": name, "probability": probability} for name, probability in classes]
                file.write(json.dumps({"file": image, "classes": listed}, ensure_ascii=False) + "\n")

        yield write


IMAGES_AT_ONCE = 32
MAX_BYTES, BYTES_PER_PX = 500_000_000, 4  # of images that are decoded in advance


def classify_files(
    model: Model, images: Sequence[FoundImage], top: int, skipped: list[SkippedImage]
) -> Iterator[tuple[str, list[ClassProbability]]]:
    """Yield each image's path and its most likely classes; add files that cannot be read to `skipped`."""
    decoded = ordered_map(
        partial(_decode, model.reader), images, num_cores(), num_bytes=_num_bytes, max_bytes=MAX_BYTES
    )
    for start in range(0, len(images), IMAGES_AT_ONCE):
        paths: list[str] = []
        some = zip(images[start : start + IMAGES_AT_ONCE], decoded, strict=False)
        probabilities = model.predict(_usable(some, paths, skipped))
        # Among equally likely classes, the one with the lower index comes first, as in evaluation.
        ranked = probabilities.sort(dim=1, descending=True, stable=True)
        for path, values, classes in zip(paths, ranked.values.tolist(), ranked.indices.tolist(), strict=True):
            likeliest = list(zip(classes, values, strict=True))[:top]
            yield path, [ClassProbability(model.classes[number], probability) for number, probability in likeliest]


def _usable(images: Iterable[tuple[FoundImage, Any]], paths: list[str], skipped: list[SkippedImage]) -> Iterator[Any]:
    """Yield decoded images one at a time, since large ones need a lot of memory; append their paths to `paths`."""
    for found, image in images:
        if isinstance(image, SkippedImage):
            skipped.append(image)
        else:
            paths.append(str(found.path))
            yield image


def _num_bytes(image: FoundImage) -> int:
    try:
        height, width = image_size(image.path)
    except BadImage:
        return 0
    return height * width * BYTES_PER_PX


def _decode(reader: ImageReader, image: FoundImage) -> Any:
    """Return a decoded image, or a SkippedImage."""
    try:
        return reader.decode(image.path)
    except BadImage as problem:
        return SkippedImage(str(image.path), str(problem))
