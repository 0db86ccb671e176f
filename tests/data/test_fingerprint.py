"""The fingerprint of a run's data covers images and labels."""

from __future__ import annotations

import numpy as np
from made_data import random_images

from paceline.contracts.recipe import DataSpec
from paceline.data.fingerprint import IDENTITY_SAMPLES, describe_samples, fingerprint
from paceline.data.source import ArraySource, Sample, Source


class OnlyRead(Source):
    """A source whose labels can be found only by reading the samples."""

    def __init__(self, source: Source) -> None:
        self.source, self.spec = source, source.spec

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int) -> Sample:
        return self.source.read(index)


def test_the_fingerprint_of_data_depends_on_labels_too() -> None:
    image, labels = random_images(40, 6, 6, 3), np.arange(40)
    plain = describe_samples(ArraySource({"image": image}, DataSpec(3, 6, 6)))
    assert plain == f"40 samples, {fingerprint(ArraySource({'image': image}, DataSpec(3, 6, 6)), IDENTITY_SAMPLES)}"
    for change in (slice(0, None), slice(7, 8)):  # change all labels, then one that a spot check would miss
        other = labels.copy()
        other[change] += 1
        sources = [
            ArraySource({"image": image, "label": one}, DataSpec(3, 6, 6, 41)) for one in (labels, labels, other)
        ]
        first, same, changed = map(describe_samples, sources)
        assert first == same and len({plain, first, changed}) == 3
    read = [describe_samples(OnlyRead(source)) for source in (sources[0], shifted(sources[0]))]
    assert read[0] != read[1]


def shifted(source: ArraySource) -> Source:
    return ArraySource(source.arrays | {"label": source.arrays["label"] + 1}, source.spec)
