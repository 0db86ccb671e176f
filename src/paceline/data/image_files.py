"""Sources whose samples are one or more image files, of any size."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.config.flags import SeparateTestFolder
from paceline.config.settings import RunSettings
from paceline.contracts.data_spec import EIGHT_BITS
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.core.files import user_path
from paceline.core.terminal import counted
from paceline.core.text import printable
from paceline.data.file_lists import (
    SUFFIXES,
    Problem,
    check_split_names,
    describe_problems,
    existing_folder,
    first_messages,
    list_folder,
    listed_elsewhere,
    too_small,
    unreadable,
    unreadable_file,
    unused_validation,
)
from paceline.data.source import Encoded, Sample, Source, group_keys
from paceline.data.whole_source import num_readers
from paceline.images.decode import PIXEL_LIMIT, BadImage
from paceline.images.readers import Decoded, ImageReader, choose_reader
from paceline.images.rectangles import Box
from paceline.images.regions.open_image import huge_size, open_any_image
from paceline.images.regions.region_image import RegionImage

_ACCEPTED = ContextVar("huge test images are accepted", default=False)


@contextmanager
def accepting_huge_images() -> Iterator[None]:
    """Sources that are opened in this context accept huge test images, since the caller reads them by region."""
    before = _ACCEPTED.set(True)
    try:
        yield
    finally:
        _ACCEPTED.reset(before)


def huge_images_are_accepted() -> bool:
    """Return whether the code runs inside `accepting_huge_images`."""
    return _ACCEPTED.get()


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
Sizes = dict[str, tuple[int, int]]  # height and width of each field
SplitNames = Mapping[str, Sequence[str]]  # accepted folder names for each split


class _Header(NamedTuple):
    sizes: Sizes
    problem: Problem | None  # None if the sample can be used


class ImageFiles(Source):
    """Base class for sources that read image files. A subclass lists the files; headers determine the image sizes."""

    split_layouts: ClassVar[tuple[SplitNames, ...]] = ()  # supported sets of split folders
    reads_regions: ClassVar[bool] = True  # whether test images may be too large to be decoded as a whole

    @classmethod
    def measure_whole(cls, settings: RunSettings) -> RunSettings:
        """Return settings that use the entire folder for testing, unless it has a test split."""
        assert isinstance(settings, SeparateTestFolder)
        root = user_path(settings.data_root)
        has_test_split = any(split_folder(root, "test", names) is not None for names in cls.split_layouts)
        if settings.test_root or has_test_split:
            return settings
        return dataclasses.replace(settings, test_root=settings.data_root, validation=0.0)

    def __init__(
        self, root: Path, samples: Sequence[Files], split: str, settings: RunSettings, problems: Sequence[Problem] = ()
    ) -> None:
        """Read the headers of all files. `problems` are those of unmatched files, which count as unreadable."""
        chosen = choose_reader([file for files in samples for file in files.values()], settings)
        self.reader = chosen.reader
        listing = list_folder(root, for_training=True)
        if not samples and not problems:
            raise UserError("; ".join([f"{root}: has no images ({', '.join(sorted(SUFFIXES))})", *listing.notes]))
        self.root, self.size = root, settings.size
        self.notes = (*listing.notes, *chosen.notes)
        self.not_used = tuple(f"{root}/{entry}" for entry in listing.unusable)
        if split == "train":
            self.notes += self._unused_splits(settings)
        may_skip = settings.bad_images == "skip"
        by_region = huge_images_are_accepted() and self.reads_regions and split == "test" and not settings.size
        # Threads run in parallel, because Pillow releases the GIL.
        with ThreadPoolExecutor(max(1, num_readers(settings))) as threads:
            read = threads.map(lambda files: self._read_header(files, may_skip, by_region), samples)
            headers = list(counted(read, f"reading the image headers in {root}", len(samples)))
        if may_skip and settings.crop and split == "train" and not self.size:
            headers = [self._large_enough(*pair, settings.crop) for pair in zip(samples, headers, strict=True)]
        problems = [*problems, *(one.problem for one in headers if one.problem)]
        if problems and not may_skip:
            advice = f"use --bad-images skip to leave these files out{listed_elsewhere(problems)}"
            raise UserError(f"{first_messages(problems)}; {advice}")
        usable = [(files, one.sizes) for files, one in zip(samples, headers, strict=True) if not one.problem]
        if not usable:
            raise UserError(f"{root}: none of its images can be used: {first_messages(problems)}")
        if problems:
            count = len(problems) + len(usable)
            self.not_used += tuple(f"{root}/{problem.message}" for problem in problems)
            self.notes += (f"left out {len(problems)} of {count} samples in {root}: {describe_problems(problems)}",)
        self.files = [files for files, _ in usable]
        self._headers = [sizes for _, sizes in usable]
        assert isinstance(settings, SeparateTestFolder)
        self.groups = group_keys(settings.group_by, root, [files["image"] for files in self.files])
        image_sizes = np.array([self.image_size(sizes) for sizes in self._headers], dtype=np.int64)
        height, width = (settings.crop, settings.crop) if settings.crop else image_sizes[0].tolist()
        if self.size:
            height = width = self.size
        else:
            self.sizes = image_sizes
        pixels = self.reader.pixel_format
        self.spec = DataSpec(self.reader.channels, height, width, dtype=pixels.dtype, value_range=pixels.declared_range)

    def _unused_splits(self, settings: RunSettings) -> tuple[str, ...]:
        assert isinstance(settings, SeparateTestFolder)
        root = user_path(settings.data_root)
        for names in () if settings.test_root else self.split_layouts:
            train, test = (_first_folder(root, names[name]) for name in ("train", "test"))
            if train and test:
                return unused_validation(root, test)
        return ()

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> Sample:
        return {name: self._decode(path, self._headers[index][name]) for name, path in self.files[index].items()}

    def encoded(self, index: int) -> Encoded | None:
        is_rgb = (self.spec.channels, self.spec.dtype) == (3, "uint8")
        return self.files_of(index) if is_rgb and not self.size else None

    def files_of(self, index: int) -> Encoded | None:
        return Encoded(self.files[index], {})

    def originals(self, index: int) -> Encoded | None:
        return self.files_of(index)

    def name_of(self, index: int) -> str:
        return self._name(self.files[index]["image"])

    def find_problem(self, names: Mapping[str, str], sizes: Sizes) -> Problem | None:
        """Return why images of these sizes cannot form a sample; None if they can."""
        return None

    def image_size(self, sizes: Sizes) -> tuple[int, int]:
        """Return the height and width of the sample's "image", given the sizes of its files."""
        return sizes["image"]

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path)

    def regions(self, index: int, num_sharing: int = 1) -> SampleRegions:
        """Open a sample whose images are read by region, in each of `num_sharing` processes; close it after use."""
        return SampleRegions(self.region_fields(index), self.reader, num_sharing)

    def region_fields(self, index: int) -> dict[str, RegionField]:
        """Return the file of each field, and the field's position in it."""
        files, sizes = self.files[index], self._headers[index]
        scales = {"low": max(1, self.spec.scale)}
        return {name: RegionField(path, sizes[name], scale=scales.get(name, 1)) for name, path in files.items()}

    @property
    def has_huge_images(self) -> bool:
        """Whether some images can only be read by region."""
        return any(height * width > PIXEL_LIMIT for sizes in self._headers for height, width in sizes.values())

    def _read_header(self, files: Files, decoded: bool, by_region: bool) -> _Header:
        sizes: Sizes = {}
        for name, path in files.items():
            try:
                sizes[name] = self._size(path, decoded, by_region)
            except BadImage as error:
                return _Header({}, unreadable_file(printable(self._name(path)), error))
        names = {name: printable(self._name(path)) for name, path in files.items()}
        return _Header(sizes, self.find_problem(names, sizes))

    def _size(self, path: Path, decoded: bool, by_region: bool) -> tuple[int, int]:
        try:
            size = self.reader.size(path)
        except BadImage:
            huge = huge_size(path) if by_region else None
            if huge is None:
                raise
            return huge
        if decoded:  # decoding also detects wrong headers and damaged pixels
            image = self.reader.decode(path)
            size = (image.height, image.width)
        return size

    def _large_enough(self, files: Files, header: _Header, crop: int) -> _Header:
        if header.problem or min(self.image_size(header.sizes)) >= crop:
            return header
        height, width = self.image_size(header.sizes)
        return header._replace(problem=too_small(printable(self._name(files["image"])), (height, width), crop))

    def _decode(self, path: Path, size: tuple[int, int]) -> NDArray[Any]:
        return self.reader.arrange(self.open(path, size), self.size)

    def open(self, path: Path, size: tuple[int, int]) -> Decoded:
        """Decode the image in a file; raise UserError if its size differs from the size in the header."""
        try:
            image = self.reader.decode(path)
        except BadImage as error:
            raise unreadable(path, error) from error
        if (image.height, image.width) != size:
            raise UserError(
                f"{printable(path)}: the image is {image.width}×{image.height} pixels, "
                f"but its header specifies {size[1]}×{size[0]}; use --bad-images skip to leave such files out"
            )
        return image


def fields_of(source: Source) -> set[str]:
    """Return the names of a sample's fields; images that can only be read by region are not read."""
    if isinstance(source, ImageFiles) and source.has_huge_images:
        return set(source.region_fields(0))
    return set(source.read(0))


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
