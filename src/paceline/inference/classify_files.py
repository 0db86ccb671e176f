"""Classifies image files in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from paceline.images.decode import BadImage
from paceline.images.readers import ImageReader
from paceline.inference.find_images import FoundImage
from paceline.inference.model import Model
from paceline.inference.prediction_file import ClassProbability
from paceline.inference.skipped import SkippedImage

IMAGES_AT_ONCE = 32


def classify_files(
    model: Model, images: Sequence[FoundImage], top: int, skipped: list[SkippedImage]
) -> Iterator[tuple[str, list[ClassProbability]]]:
    """Yield each image's path and its most likely classes; add files that cannot be read to `skipped`."""
    for start in range(0, len(images), IMAGES_AT_ONCE):
        paths: list[str] = []
        probabilities = model.predict(_decoded(model.reader, images[start : start + IMAGES_AT_ONCE], paths, skipped))
        # Among equally likely classes, the one with the lower index comes first, as in evaluation.
        ranked = probabilities.sort(dim=1, descending=True, stable=True)
        for path, values, classes in zip(paths, ranked.values.tolist(), ranked.indices.tolist(), strict=True):
            likeliest = list(zip(classes, values, strict=True))[:top]
            yield path, [ClassProbability(model.classes[number], probability) for number, probability in likeliest]


def _decoded(
    reader: ImageReader, images: Sequence[FoundImage], paths: list[str], skipped: list[SkippedImage]
) -> Iterator[Any]:
    """Yield images one at a time, since large ones need a lot of memory; append their paths to `paths`."""
    for image in images:
        try:
            decoded = reader.decode(image.path)
        except BadImage as problem:
            skipped.append(SkippedImage(str(image.path), str(problem)))
            continue
        paths.append(str(image.path))
        yield decoded
