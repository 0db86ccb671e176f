"""Samples that consist of encoded images, in files or shards: how images form a sample, and which cannot be used."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.config.flags import SeparateTestFolder
from paceline.config.settings import RunSettings
from paceline.contracts.data_spec import EIGHT_BITS, INPUT, LEFT_OUT
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.core.files import user_path
from paceline.core.ordered_map import ordered_map
from paceline.core.terminal import counted
from paceline.core.text import printable
from paceline.data.file_lists import (
    check_split_names,
    existing_folder,
    first_few,
    group_keys,
    list_folder,
    named_root,
    no_images,
    note_left_out,
    split_files,
    too_small,
    unreadable,
)
from paceline.data.source import LABEL, LOW, Encoded, Sample, Source
from paceline.data.worker_pool import num_readers
from paceline.images.decode import PIXEL_LIMIT, BadImage
from paceline.images.readers import Decoded, ImageReader, choose_reader
from paceline.images.rectangles import Box
from paceline.images.regions import RegionImage, huge_size, open_any_image

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
        """Return which file contains an image of a sample, for error messages."""
        raise NotImplementedError

    def image_name(self, index: int, field: str) -> str:
        """Return the name of an image of a sample, for lists of problems."""
        raise NotImplementedError

    def keep(self, rows: NDArray[np.int64]) -> None:
        """Keep only some of the samples."""
        self.stored_sizes = {field: sizes[rows] for field, sizes in self.stored_sizes.items()}
        self.labels = None if self.labels is None else self.labels[rows]

    def numbers_of(self, indices: NDArray[np.int64]) -> Sample | None:
        return {} if self.labels is None else {LABEL: self.labels[indices]}

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

    def measure_images(self, measure: Callable[[Content], tuple[int, int]], settings: RunSettings) -> dict[int, str]:
        """Set `stored_sizes`, using several threads; return, by row, the problems with images that are unreadable."""

        def measure_sample(row: int) -> dict[str, tuple[int, int]] | str:
            sizes = {}
            for field, content in self.contents([row])[0].items():
                try:
                    sizes[field] = measure(content)
                except BadImage as error:
                    return f"{self._name(row, field)}: unreadable image ({error})"
            return sizes

        # Threads run in parallel, because Pillow releases the GIL.
        rows = ordered_map(measure_sample, range(len(self)), max(1, num_readers(settings)))
        measured = list(counted(rows, f"reading the images in {self.shown}", len(self)))
        fields = next((tuple(sizes) for sizes in measured if not isinstance(sizes, str)), ())
        self.stored_sizes = {
            field: np.array([(1, 1) if isinstance(sizes, str) else sizes[field] for sizes in measured], dtype=np.int64)
            for field in fields
        }
        return {row: problem for row, problem in enumerate(measured) if isinstance(problem, str)}

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

    def check_sizes(self, smallest: int = 0) -> dict[int, str]:
        """Return, by row, the problems with images that do not fit together, or are smaller than `smallest`."""
        if not self.stored_sizes:
            return {}
        problems: dict[int, str] = {}
        layout, whole, sizes = self.layout, self.stored_sizes[INPUT], self.layout.image_sizes(self.stored_sizes)
        for row in np.flatnonzero((sizes < smallest).any(axis=1)).tolist():
            problems[row] = too_small(self._name(row, INPUT), sizes[row])
        if layout.row:
            (height, width), count = whole.T, len(layout.row)
            squares = np.where(width % height == 0, width // height, 0)
            # In all known datasets, rows of more than two panels consist of squares; pairs can have any shape.
            fits = (width % count == 0) & ((count == 2) | (squares == 0) | (squares == count))
            for row in np.flatnonzero(~fits).tolist():
                problems[row] = (
                    f"{self._name(row, INPUT)}: {width[row]}×{height[row]} pixels is not a row of {count} equal panels "
                    "(set by panels=…)"
                )
        for field in layout.fields:
            others, is_low = self.stored_sizes[field], field == LOW
            fits = find_ratios(self.stored_sizes) == layout.scale if is_low else (others == whole).all(axis=1)
            expected = f", which is not 1/{layout.scale} of it" if is_low else ""
            for row in np.flatnonzero(~fits).tolist():
                (height, width), (other_height, other_width) = whole[row], others[row]
                name, other = f"{self._name(row, INPUT)} is {width}×{height} pixels", self._name(row, field)
                problems[row] = f"{name} but {other} is {other_width}×{other_height}{expected}"
        return problems

    def leave_out(self, problems: Mapping[int, str], unmatched: Sequence[str] = ()) -> None:
        """Leave out the samples in `problems`, by row; raise UserError unless bad images are skipped.

        `unmatched` are the problems with images that belong to no sample.
        """
        every = [*unmatched, *(problems[row] for row in sorted(problems))]
        if not every:
            return
        if not self.may_skip:
            raise UserError(f"{self.shown}: {first_few(every)}; use --bad-images skip to leave these out")
        num_left = len(self) - len(problems)
        if not num_left:
            raise UserError(f"{self.shown}: none of its images can be used: {first_few(every)}")
        self.not_used += tuple(f"{self.shown}/{problem}" for problem in every)
        self.notes += (note_left_out(self.shown, every, num_left),)
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


_ACCEPTED = ContextVar("huge test images are accepted", default=False)


@contextmanager
def accepting_huge_images() -> Iterator[None]:
    """Sources that are opened in this context accept huge test images, since the caller reads them by region."""
    before = _ACCEPTED.set(True)
    try:
        yield
    finally:
        _ACCEPTED.reset(before)


class RegionField(NamedTuple):
    """The place of a sample's field in a file."""

    path: Path
    size: tuple[int, int]  # height and width of the image in the file
    left: int = 0  # first column of the field, if the file is a row of panels
    scale: int = 1  # how many pixels of the sample's "image" a pixel of this field covers, along one side


class SampleRegions:
    """The images of one sample. Regions can be read by several threads at once. Close it after use.

    Images that are decoded as a whole must fit in the free memory, divided among `num_sharing` processes.
    """

    def __init__(self, fields: dict[str, RegionField], reader: ImageReader, num_sharing: int = 1) -> None:
        self._fields, self._reader, self._stack = fields, reader, ExitStack()
        self._images: dict[Path, RegionImage | NDArray[Any]] = {}  # arrays are images that are not huge
        channels = reader.channels if reader.pixel_format == EIGHT_BITS else 0  # as for whole images
        for path, size in {field.path: field.size for field in fields.values()}.items():
            try:
                if size[0] * size[1] > PIXEL_LIMIT:
                    self._images[path] = self._stack.enter_context(open_any_image(path, num_sharing, channels))
                else:
                    self._images[path] = reader.arrange(reader.decode(path), 0)
            except BadImage as error:
                self.close()
                raise unreadable(path, error) from error

    def read(self, window: Box) -> Sample:
        """Return every field of the sample inside a window of its "image"."""
        return {name: self._read(field, window) for name, field in self._fields.items()}

    def close(self) -> None:
        """Close all files."""
        self._stack.close()

    def __enter__(self) -> SampleRegions:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, field: RegionField, window: Box) -> NDArray[Any]:
        place = Box(*(side // field.scale for side in window))
        place, image = place._replace(left=place.left + field.left), self._images[field.path]
        if isinstance(image, np.ndarray):
            return image[place.slices]
        try:
            return self._reader.from_region(image.read(0, place), image.format)
        except BadImage as error:
            raise unreadable(field.path, error) from error


Files = dict[str, Path]  # the file for each field in a sample
SplitNames = Mapping[str, Sequence[str]]  # accepted folder names for each split


class FileSamples(ImageSamples):
    """Base class for sources with one file for every image of a sample."""

    root: Path  # the split's folder
    files: list[Files]

    def __len__(self) -> int:
        return len(self.files)

    def contents(self, indices: Sequence[int]) -> list[Mapping[str, Content]]:
        return [self.files[index] for index in indices]

    def place_of(self, index: int, field: str) -> str:
        return str(self.files[index][field])

    def image_name(self, index: int, field: str) -> str:
        path = self.files[index][field]
        return str(path.relative_to(self.root) if path.is_relative_to(self.root) else path)

    def name_of(self, index: int) -> str:
        return self.image_name(index, INPUT)

    def keep(self, rows: NDArray[np.int64]) -> None:
        super().keep(rows)
        self.files = [self.files[row] for row in rows.tolist()]

    def files_of(self, index: int) -> Encoded | None:
        numbers = {} if self.labels is None else {LABEL: np.asarray(self.labels[index])}
        return Encoded(self.files[index], numbers)

    def originals(self, index: int) -> Encoded | None:
        return self.files_of(index)

    def encoded(self, index: int) -> Encoded | None:
        """Return the files if they are RGB and already have the right size; None if they must be changed."""
        if (self.spec.channels, self.spec.dtype) != (3, "uint8") or self.layout.row:
            return None
        side = self.layout.side
        try:
            sizes = {self.reader.size(path) for path in self.files[index].values()} if side else {(side, side)}
        except BadImage as error:
            raise unreadable(self.place_of(index, INPUT), error) from error
        return self.files_of(index) if sizes == {(side, side)} else None


class SampleFiles(NamedTuple):
    """The samples of a split."""

    root: Path  # the split's folder
    samples: list[Files]
    unmatched: Sequence[str] = ()  # the problems with files that belong to no sample


class ImageFiles(FileSamples):
    """Base class for sources with images of any size. A subclass lists the files; headers determine the sizes."""

    split_layouts: ClassVar[tuple[SplitNames, ...]] = ()  # supported sets of split folders
    reads_regions: ClassVar[bool] = True  # whether test images may be too large to be decoded as a whole

    @classmethod
    def has_test_split(cls, settings: SeparateTestFolder) -> bool:
        root = user_path(settings.data_root)
        return any(split_folder(root, "test", names) is not None for names in cls.split_layouts)

    def __init__(
        self,
        listed: SampleFiles,
        split: str,
        settings: RunSettings,
        row: tuple[str, ...] = (),
        panels: tuple[str, ...] = (),
    ) -> None:
        """Read the headers of all files. `row` and `panels` are those of the sample layout."""
        assert isinstance(settings, SeparateTestFolder)
        self.root, self.files, unmatched = listed
        self.shown = printable(self.root)
        listing = list_folder(self.root, for_training=True)
        if not self.files and not unmatched:
            raise no_images(self.root, listing)
        self.notes += listing.notes
        self.not_used = tuple(f"{self.root}/{entry}" for entry in listing.unusable)
        self.choose_reader((path for files in self.files for path in files.values()), settings)
        by_region = _ACCEPTED.get() and self.reads_regions and split == "test" and not settings.size

        def measure(path: Any) -> tuple[int, int]:
            try:
                size = self.reader.size(path)
            except BadImage:
                huge = huge_size(path) if by_region else None
                if huge is None:
                    raise
                return huge
            return self.decoded_size(path) if self.may_skip else size

        problems = self.measure_images(measure, settings)
        fields = tuple(self.files[0]) if self.files else (INPUT,)
        scale = self.find_scale(problems) if LOW in self.stored_sizes else 0
        self.layout = SampleLayout(fields, row, panels, settings.size, scale)
        must_fit_crop = self.may_skip and split == "train" and not settings.size
        self.leave_out(self.check_sizes(settings.crop if must_fit_crop else 0) | problems, unmatched)
        self.groups = group_keys(settings.group_by, self.root, [files[INPUT] for files in self.files])
        self.spec = self.make_spec(settings)

    def regions(self, index: int, num_sharing: int = 1) -> SampleRegions:
        """Open a sample whose images are read by region, in each of `num_sharing` processes; close it after use."""
        return SampleRegions(self.region_fields(index), self.reader, num_sharing)

    def region_fields(self, index: int) -> dict[str, RegionField]:
        """Return the file of each field, and the field's position in it."""
        fields = {}
        for name, path in self.files[index].items():
            height, width = self.stored_sizes[name][index].tolist()
            fields[name] = RegionField(path, (height, width), scale=self.layout.scale if name == LOW else 1)
        if not self.layout.row:
            return fields
        row = fields[INPUT]
        return {name: row._replace(left=left) for name, (left, _) in self.layout.crops(row.size[1]).items()}

    @property
    def has_huge_images(self) -> bool:
        """Whether some images can only be read by region."""
        return any((sizes.prod(axis=1) > PIXEL_LIMIT).any() for sizes in self.stored_sizes.values())


def fields_of(source: Source) -> set[str]:
    """Return the names of a sample's fields; images that can only be read by region are not read."""
    if isinstance(source, ImageFiles) and source.has_huge_images:
        return set(source.region_fields(0))
    return set(source.read(0))


def find_split(
    split: str,
    settings: SeparateTestFolder,
    names: SplitNames,
    list_samples: Callable[[Path], tuple[list[Files], Sequence[str]]],
) -> SampleFiles:
    """Return the samples in a split's folder; without split folders, a fixed fifth of the samples is for testing.

    `list_samples` returns the samples in a folder, and the problems with files that belong to no sample.
    """
    folder = separate_folder(split, settings, names) or split_folder(named_root(settings), split, names)
    root = folder or named_root(settings)
    samples, unmatched = list_samples(root)
    if folder is None and samples:
        files = [files[INPUT] for files in samples]
        chosen = split_files(settings.group_by, root, files, split, f"--data-root {root}")
        samples = [samples[index] for index in chosen]
    return SampleFiles(root, samples, unmatched)


def split_folder(root: Path, split: str, names: SplitNames) -> Path | None:
    """Return a split's folder, which can have one of several names; None if there are no split folders."""
    existing_folder(root, "--data-root")
    if not any((root / name).is_dir() for listed in names.values() for name in listed):
        if "train" in names["train"]:  # a source may look for other names first
            check_split_names(root)
        return None
    found = _first_folder(root, names[split])
    if found is None:
        raise UserError(f"--data-root {root}: has no folder {' or '.join(names[split])}; add one")
    return found


def _first_folder(root: Path, names: Iterable[str]) -> Path | None:
    return next((root / name for name in names if (root / name).is_dir()), None)


def separate_folder(split: str, settings: SeparateTestFolder, names: SplitNames) -> Path | None:
    """Return the folder with all samples of a split if `test_root` is set, else None."""
    if not settings.test_root:
        return None
    flag, text = ("--test-root", settings.test_root) if split == "test" else ("--data-root", settings.data_root)
    root = existing_folder(user_path(text), flag)
    if split == "test":
        return root
    return _first_folder(root, names["train"]) or root
