"""Samples that consist of encoded images, in files or shards: how images form a sample, and which cannot be used."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.config.flags import SeparateTestFolder
from paceline.config.settings import RunSettings
from paceline.contracts.data_spec import INPUT, LEFT_OUT
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.core.ordered_map import ordered_map
from paceline.core.terminal import counted
from paceline.core.text import printable
from paceline.data.file_lists import Problem, describe_problems, first_messages, listed_elsewhere, too_small, unreadable
from paceline.data.source import LABEL, LOW, Sample, Source
from paceline.data.whole_source import num_readers
from paceline.images.decode import BadImage
from paceline.images.readers import Decoded, ImageReader, choose_reader

Content = Path | bytes  # an encoded image
ImageSizes = Mapping[str, NDArray[np.int64]]  # by field: the height and width of every sample's image, [n, 2]


@dataclass(frozen=True)
class SampleLayout:
    """How the images of a sample are used."""

    fields: tuple[str, ...]  # the images that are read
    row: tuple[str, ...] = ()  # names of the panels from left to right, if "image" is a row of panels
    panels: tuple[str, ...] = ()  # fields to predict from the image
    side: int = 0  # height and width of the square images; 0 keeps the size of each image
    scale: int = 0  # ratio of "image" to "low"; 0 if there is no field "low"

    def crops(self, width: int) -> dict[str, tuple[int, int]]:
        """Return the first column of each panel, and the column after its last one, in a row of this width."""
        panel = width // len(self.row)
        return {name: (panel * at, panel * (at + 1)) for at, name in enumerate(self.row) if name != LEFT_OUT}

    def image_sizes(self, sizes: ImageSizes) -> NDArray[np.int64]:
        """Return the height and width of each sample's "image"."""
        return sizes[LOW] * self.scale if self.scale else sizes[INPUT] // (1, max(1, len(self.row)))

    def arrange(self, images: Mapping[str, Decoded], reader: ImageReader) -> Sample:
        """Return the fields of a sample, given its images as decoded by `reader`."""
        if self.row:
            row = images[INPUT]
            crops = self.crops(row.width).items()
            images = {name: row.crop((left, 0, right, row.height)) for name, (left, right) in crops}
        sample = {name: reader.arrange(image, self.side) for name, image in images.items()}
        if self.scale:
            height, width = (length * self.scale for length in sample[LOW].shape[:2])
            sample[INPUT] = sample[INPUT][:height, :width]
        return sample


def find_ratios(sizes: ImageSizes) -> NDArray[np.int64]:
    """Return the whole-number ratio of "image" to "low" for each sample; 0 if no ratio fits.

    The image may be larger by a remainder that is smaller than the ratio.
    """
    size, low = sizes[INPUT], sizes[LOW]
    ratio = size[:, 0] // low[:, 0]
    fits = (ratio > 1) & (ratio == size[:, 1] // low[:, 1]) & ((size % low).max(axis=1) < ratio)
    return np.where(fits, ratio, 0)


class ImageSamples(Source):
    """Base class for sources whose samples are encoded images. A subclass lists the samples and returns the images."""

    shown: str  # where the samples are, for messages
    reader: ImageReader
    layout: SampleLayout
    stored_sizes: ImageSizes  # the size of every stored image, by field; empty if it is not known
    labels: NDArray[np.int64] | None = None
    may_skip: bool

    @classmethod
    def measure_whole(cls, settings: RunSettings) -> RunSettings:
        """Return settings that use the entire folder for testing, unless it has a test split."""
        assert isinstance(settings, SeparateTestFolder)
        if settings.test_root or cls.has_test_split(settings):
            return settings
        return dataclasses.replace(settings, test_root=settings.data_root, validation=0.0)

    @classmethod
    def has_test_split(cls, settings: SeparateTestFolder) -> bool:
        """Return whether `--data-root` has a test split of its own."""
        raise NotImplementedError

    def contents(self, indices: Sequence[int]) -> list[Mapping[str, Content]]:
        """Return the encoded images of several samples, by field."""
        raise NotImplementedError

    def place_of(self, index: int, field: str) -> str:
        """Return where an image of a sample is, for error messages."""
        raise NotImplementedError

    def image_name(self, index: int, field: str) -> str:
        """Return the name of an image of a sample, for lists of problems."""
        raise NotImplementedError

    def keep(self, rows: NDArray[np.int64]) -> None:
        """Keep only some of the samples."""
        self.stored_sizes = {field: sizes[rows] for field, sizes in self.stored_sizes.items()}
        self.labels = None if self.labels is None else self.labels[rows]

    def read(self, index: int) -> Sample:
        return self.decode(index, self.contents([index])[0])

    def decode(self, index: int, contents: Mapping[str, Content]) -> Sample:
        """Return a sample, given its encoded images."""
        images = {}
        for field, content in contents.items():
            try:
                images[field] = image = self.reader.decode(content)
            except BadImage as error:
                raise unreadable(self.place_of(index, field), error) from error
            if field in self.stored_sizes:
                height, width = self.stored_sizes[field][index].tolist()
                if (image.height, image.width) != (height, width):
                    raise UserError(
                        f"{self.place_of(index, field)}: the {field} is {image.width}×{image.height} pixels, "
                        f"but its header specifies {width}×{height}; use --bad-images skip to leave out such images"
                    )
        sample = self.layout.arrange(images, self.reader)
        return sample if self.labels is None else {**sample, LABEL: np.asarray(self.labels[index])}

    def choose_reader(self, images: Iterable[Content], settings: RunSettings) -> None:
        """Choose the reader for the images; the first one that can be read decides what the settings leave open."""
        self.may_skip = settings.bad_images == "skip"
        self.reader, notes = choose_reader(images, settings)
        self.notes += notes

    def measure_images(
        self, measure: Callable[[Content], tuple[int, int]], settings: RunSettings
    ) -> dict[int, Problem]:
        """Set `stored_sizes`, using several threads; return, by row, the samples with an image that is unreadable."""

        def measure_sample(row: int) -> dict[str, tuple[int, int]] | Problem:
            sizes = {}
            for field, content in self.contents([row])[0].items():
                try:
                    sizes[field] = measure(content)
                except BadImage as error:
                    return Problem.of(self._name(row, field), f"unreadable image ({error})", error.kind)
            return sizes

        # Threads run in parallel, because Pillow releases the GIL.
        rows = ordered_map(measure_sample, range(len(self)), max(1, num_readers(settings)))
        measured = list(counted(rows, f"reading the images in {self.shown}", len(self)))
        problems = {row: problem for row, problem in enumerate(measured) if isinstance(problem, Problem)}
        fields = next((tuple(sizes) for sizes in measured if not isinstance(sizes, Problem)), ())
        self.stored_sizes = {
            field: np.array(
                [(1, 1) if isinstance(sizes, Problem) else sizes[field] for sizes in measured], dtype=np.int64
            )
            for field in fields
        }
        return problems

    def decoded_size(self, content: Content) -> tuple[int, int]:
        """Decode an image, which detects wrong headers and damaged pixels, and return its height and width."""
        image = self.reader.decode(content)
        return image.height, image.width

    def find_scale(self, excluded: Iterable[int] = ()) -> int:
        """Return the most common ratio of "image" to "low"; raise UserError if no image is larger than its "low"."""
        ratios = np.delete(find_ratios(self.stored_sizes), list(excluded))
        values, counts = np.unique(ratios[ratios > 1], return_counts=True)
        if len(ratios) and not len(values):
            raise UserError(
                f"{self.shown}: {printable(self.name_of(0))}: the image must be larger than its low-resolution version "
                "by a whole-number factor, such as 4"
            )
        return int(values[counts.argmax()]) if len(values) else 0

    def check_sizes(self, smallest: int = 0) -> dict[int, Problem]:
        """Return, by row, the samples whose images do not fit together, or are smaller than `smallest`."""
        if not self.stored_sizes:
            return {}
        problems: dict[int, Problem] = {}
        layout, whole, sizes = self.layout, self.stored_sizes[INPUT], self.layout.image_sizes(self.stored_sizes)
        for row in np.flatnonzero((sizes < smallest).any(axis=1)).tolist():
            problems[row] = too_small(self._name(row, INPUT), sizes[row], smallest)
        if layout.row:
            (height, width), count = whole.T, len(layout.row)
            squares = np.where(width % height == 0, width // height, 0)
            # In all known datasets, rows of more than two panels consist of squares; pairs can have any shape.
            fits = (width % count == 0) & ((count == 2) | (squares == 0) | (squares == count))
            for row in np.flatnonzero(~fits).tolist():
                kind = f"not a row of {count} equal panels"
                hint = f"; the image looks like a row of {squares[row]} panels" if squares[row] > 1 else ""
                reason = f"{width[row]}×{height[row]} pixels is {kind} (set by panels=…){hint}"
                problems[row] = Problem.of(self._name(row, INPUT), reason, kind)
        for field in layout.fields:
            others, is_low = self.stored_sizes[field], field == LOW
            fits = find_ratios(self.stored_sizes) == layout.scale if is_low else (others == whole).all(axis=1)
            expected = f", which is not 1/{layout.scale} of it" if is_low else ""
            for row in np.flatnonzero(~fits).tolist():
                (height, width), (other_height, other_width) = whole[row], others[row]
                name, other = f"{self._name(row, INPUT)} is {width}×{height} pixels", self._name(row, field)
                message = f"{name} but {other} is {other_width}×{other_height}{expected}"
                problems[row] = Problem(self._name(row, INPUT), "image sizes do not match", message)
        return problems

    def leave_out(self, problems: Mapping[int, Problem], unmatched: Sequence[Problem] = ()) -> None:
        """Leave out the samples in `problems`, by row; raise UserError unless bad images are skipped.

        `unmatched` are the problems with images that belong to no sample.
        """
        every = [*unmatched, *(problems[row] for row in sorted(problems))]
        if not every:
            return
        if not self.may_skip:
            advice = f"use --bad-images skip to leave these out{listed_elsewhere(every)}"
            raise UserError(f"{self.shown}: {first_messages(every)}; {advice}")
        num_left = len(self) - len(problems)
        if not num_left:
            raise UserError(f"{self.shown}: none of its images can be used: {first_messages(every)}")
        self.not_used += tuple(f"{self.shown}/{problem.message}" for problem in every)
        count = f"{len(every)} of {num_left + len(every)} samples"
        self.notes += (f"left out {count} in {self.shown}: {describe_problems(every)}",)
        self.keep(np.delete(np.arange(len(self)), list(problems)))

    def make_spec(
        self, settings: RunSettings, num_classes: int = 0, class_names: tuple[str, ...] = (), *, may_flip: bool = True
    ) -> DataSpec:
        """Return the data spec; if images keep their sizes, also set `sizes`."""
        height = width = self.layout.side
        if not height:
            self.sizes = self.layout.image_sizes(self.stored_sizes)
            height, width = (settings.crop, settings.crop) if settings.crop else self.sizes[0].tolist()
        pixels = self.reader.pixel_format
        return DataSpec(
            *(self.reader.channels, height, width, num_classes, class_names, may_flip),
            scale=self.layout.scale,
            panels=self.layout.panels,
            dtype=pixels.dtype,
            value_range=pixels.declared_range,
        )

    def _name(self, row: int, field: str) -> str:
        return printable(self.image_name(row, field))
