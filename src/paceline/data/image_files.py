"""Samples of one or more pictures in files, of mixed sizes; decoded when read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.data.file_lists import SUFFIXES, first_few, unreadable
from paceline.data.source import Encoded, Sample, Source
from paceline.images.decode import BadPicture, arrange_picture, check_picture_settings, decode, upright_size

Files = dict[str, Path]  # of one sample: the file of each field
Sizes = dict[str, tuple[int, int]]  # height and width of each field


class _Looked(NamedTuple):
    sizes: Sizes
    problem: str  # why the sample cannot be used; "" if it can


class PictureFiles(Source):
    """A subclass lists the files; sizes are read from the headers, and samples that do not fit together are named."""

    def __init__(
        self, root: Path, samples: Sequence[Files], split: str, settings: RunSettings, problems: Sequence[str] = ()
    ) -> None:
        """`problems` are files that belong to no sample: named, and refused or left out like unreadable ones."""
        check_picture_settings(settings)
        if not samples and not problems:
            raise UserError(f"{root}: has no pictures ({', '.join(sorted(SUFFIXES))})")
        self.root, self.channels, self.size = root, settings.channels or 3, settings.size
        may_skip = settings.bad_images == "skip"
        with ThreadPoolExecutor(max(1, settings.workers)) as threads:  # Pillow lets go of the interpreter
            looked = list(threads.map(lambda files: self._look(files, decoded=may_skip), samples))
        if may_skip and settings.crop and split == "train" and not self.size:
            looked = [self._large_enough(files, one, settings.crop) for files, one in zip(samples, looked, strict=True)]
        problems = [*problems, *(one.problem for one in looked if one.problem)]
        if problems and not may_skip:
            raise UserError(f"{first_few(problems)}; --bad-images skip leaves such files out")
        usable = [(files, one.sizes) for files, one in zip(samples, looked, strict=True) if not one.problem]
        if not usable:
            raise UserError(f"{root}: none of its pictures can be used: {first_few(problems)}")
        if problems:
            count = len(problems) + len(usable)
            self.notes = (f"left out {len(problems)} of {count} in {root}: {first_few(problems)}",)
        self.files = [files for files, _ in usable]
        self._headers = [sizes for _, sizes in usable]
        image_sizes = np.array([self.image_size(sizes) for sizes in self._headers], dtype=np.int64)
        height, width = (settings.crop, settings.crop) if settings.crop else image_sizes[0].tolist()
        if self.size:
            height = width = self.size
        else:
            self.sizes = image_sizes
        self.spec = DataSpec(self.channels, height, width)

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> Sample:
        return {name: self._decode(path, self._headers[index][name]) for name, path in self.files[index].items()}

    def encoded(self, index: int) -> Encoded | None:
        return None if self.size or self.channels != 3 else self.made_of(index)

    def made_of(self, index: int) -> Encoded | None:
        return Encoded(self.files[index], {})

    def name_of(self, index: int) -> str:
        return self._name(self.files[index]["image"])

    def find_fault(self, names: Mapping[str, str], sizes: Sizes) -> str:
        """Why pictures of these sizes do not fit together; "" if they do."""
        return ""

    def image_size(self, sizes: Sizes) -> tuple[int, int]:
        """Height and width of the sample's "image", from those of its files."""
        return sizes["image"]

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path)

    def _look(self, files: Files, decoded: bool) -> _Looked:
        sizes: Sizes = {}
        for name, path in files.items():
            try:
                sizes[name] = upright_size(path)
                if decoded:  # which is known to be right, where a header may lack something
                    picture = decode(path)
                    sizes[name] = (picture.height, picture.width)
            except BadPicture as error:
                return _Looked({}, f"{self._name(path)}: unreadable image ({error})")
        names = {name: self._name(path) for name, path in files.items()}
        return _Looked(sizes, self.find_fault(names, sizes))

    def _large_enough(self, files: Files, looked: _Looked, crop: int) -> _Looked:
        if looked.problem or min(self.image_size(looked.sizes)) >= crop:
            return looked
        height, width = self.image_size(looked.sizes)
        return looked._replace(problem=f"{self._name(files['image'])}: {width}×{height} pixels, less than the crop")

    def _decode(self, path: Path, size: tuple[int, int]) -> np.ndarray:
        return arrange_picture(self.open(path, size), self.size, self.channels)

    def open(self, path: Path, size: tuple[int, int]) -> Image.Image:
        """The picture in a file, which must have the size that was found at first."""
        try:
            picture = decode(path)
        except BadPicture as error:
            raise unreadable(path, error) from error
        if (picture.height, picture.width) != size:
            raise UserError(
                f"{path}: {picture.width}×{picture.height} pixels, and {size[1]}×{size[0]} in its header; "
                "--bad-images skip takes the size of the pixels"
            )
        return picture


def split_folder(root: Path, split: str, names: Mapping[str, Sequence[str]]) -> Path | None:
    """The folder of a split under one of its names; None where the root has no folder for training and testing."""
    if not root.is_dir():
        raise UserError(f"--data-root {root}: no such folder")
    if not any((root / name).is_dir() for listed in names.values() for name in listed):
        return None
    found = next((root / name for name in names[split] if (root / name).is_dir()), None)
    if found is None:
        raise UserError(f"--data-root {root}: has no folder {' or '.join(names[split])}")
    return found
