"""Sources whose samples are image files: their splits, sizes and regions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.config.flags import SeparateTestFolder
from paceline.config.settings import RunSettings
from paceline.contracts.data_spec import EIGHT_BITS, INPUT
from paceline.core.errors import UserError
from paceline.core.files import user_path
from paceline.core.text import printable
from paceline.data.file_lists import (
    Problem,
    check_split_names,
    existing_folder,
    list_folder,
    named_root,
    no_images,
    unreadable,
    unused_validation,
)
from paceline.data.image_samples import Content, ImageSamples, SampleLayout
from paceline.data.source import LOW, Encoded, Sample, Source, group_keys, split_files
from paceline.images.decode import PIXEL_LIMIT, BadImage
from paceline.images.readers import ImageReader
from paceline.images.rectangles import Box
from paceline.images.regions import RegionImage, huge_size, open_any_image

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
        self._images: dict[Path, RegionImage] = {}
        self._arrays: dict[Path, NDArray[Any]] = {}  # images that are not huge
        channels = reader.channels if reader.pixel_format == EIGHT_BITS else 0  # as for whole images
        for field in fields.values():
            if field.path in self._images or field.path in self._arrays:
                continue
            try:
                if field.size[0] * field.size[1] > PIXEL_LIMIT:
                    image = open_any_image(field.path, num_sharing, channels)
                    self._images[field.path] = self._stack.enter_context(image)
                else:
                    self._arrays[field.path] = reader.arrange(reader.decode(field.path), 0)
            except BadImage as error:
                self.close()
                raise unreadable(field.path, error) from error

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
        place = place._replace(left=place.left + field.left)
        if field.path in self._arrays:
            return self._arrays[field.path][place.slices]
        image = self._images[field.path]
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
        numbers = {} if self.labels is None else {"label": np.asarray(self.labels[index])}
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
    unmatched: Sequence[Problem] = ()  # the problems with files that belong to no sample


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
        if split == "train":
            self.notes += self._unused_splits(settings)
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

    def _unused_splits(self, settings: SeparateTestFolder) -> tuple[str, ...]:
        root = user_path(settings.data_root)
        for names in () if settings.test_root else self.split_layouts:
            train, test = (_first_folder(root, names[name]) for name in ("train", "test"))
            if train and test:
                return unused_validation(root, test)
        return ()

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
    list_samples: Callable[[Path], tuple[list[Files], Sequence[Problem]]],
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
