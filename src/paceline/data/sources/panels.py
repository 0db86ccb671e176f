"""Panels: several aligned images of the same scene, an input and its targets.

Each file is a row of equally wide panels, as in pix2pix and DeepLIIF (`root/train/*.png`, `root/test/*.png`). If
there are two panels, they can be in separate files (`root/trainA/NAME`, `root/trainB/NAME`, and `testA`, `testB`). For
rows without split folders, a fixed fifth is held out for testing, unless `test_root` is set. The setting `panels` lists
the panels from left to right; `image` is the input, and `-` leaves a panel out. Without a folder, the samples are tiles
of a bundled image of stained tissue, with its separated stains and a mask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.config.settings import RunSettings
from paceline.contracts.data_spec import INPUT, LEFT_OUT, SEGMENTATION, output_panels
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.core.files import user_path
from paceline.core.text import printable
from paceline.data.bundled import FOLDER
from paceline.data.file_lists import SIZES_DIFFER, Problem, by_stem, first_few, images_in
from paceline.data.image_files import (
    Files,
    ImageFiles,
    RegionField,
    Sizes,
    SplitNames,
    separate_folder,
    split_folder,
)
from paceline.data.source import (
    TARGET,
    ArraySource,
    Encoded,
    PanelSettings,
    Sample,
    fixed_split,
    parse_panels,
    split_files,
)
from paceline.images.decode import BadImage, arrange_image, check_grey_or_rgb
from paceline.images.readers import image_size


def stained_tissue() -> dict[str, NDArray[np.uint8]]:
    """Return aligned images of the same tissue, each uint8 [512, 512, 3]: its stains, and a mask of dense tissue."""
    return {name: _read(file) for name, file in TISSUE.items()}


def _read(name: str) -> NDArray[np.uint8]:
    with Image.open(FOLDER / name) as image:
        return np.array(image.convert("RGB"))


SPLIT_NAMES: SplitNames = {"train": ("train",), "test": ("test", "val", "valid")}
PAIR_NAMES: SplitNames = {"train": ("trainA",), "test": ("testA", "valA")}
TISSUE = {  # bundled files
    INPUT: "ihc.webp",
    "hematoxylin": "ihc_hematoxylin.webp",
    "dab": "ihc_dab.webp",
    SEGMENTATION: "ihc_mask.png",
}
CHECKED_ROWS = 4  # number of samples whose targets are compared with the input
TILE_PX = 64  # side of a tile in pixels; the bundled image is 512×512


class Panels(ImageFiles):
    """Samples whose "image" is the input and whose other fields, named after the panels, are the targets."""

    Settings = PanelSettings
    split_layouts = (PAIR_NAMES, SPLIT_NAMES)

    def __init__(self, split: str, settings: PanelSettings) -> None:
        self.tiles: ArraySource | None = None  # used instead of files if no folder is given
        if _is_bundled(settings) and not (settings.test_root and split == "test"):
            self.tiles, self.files, self._headers = _tiles(split, settings), [], []
            self.spec = self.tiles.spec
            if split == "train":
                self.notes = ("no --data-root: using tiles of the stained-tissue image bundled with Paceline",)
            return
        base, samples, problems, self.in_rows = _find(split, settings)
        self.names = parse_panels(settings.panels) or _default_names(samples, self.in_rows)
        if not self.in_rows:
            if len(self.names) != 2 or LEFT_OUT in self.names:
                raise UserError(
                    f"panels={settings.panels}: the folders A and B contain two panels; set exactly two names"
                )
            samples = [dict(zip(self.names, files.values(), strict=True)) for files in samples]
        super().__init__(base, samples, split, settings, problems)
        self.spec = dataclasses.replace(self.spec, panels=output_panels(self.names))
        repeated = [self.name_of(index) for index in range(min(CHECKED_ROWS, len(self))) if self._repeats_input(index)]
        if repeated:
            self.notes += (
                f"{split}: targets in {first_few(repeated)} are copies of the input, so their metrics are meaningless",
            )

    def __len__(self) -> int:
        return len(self.tiles) if self.tiles else super().__len__()

    def name_of(self, index: int) -> str:
        return f"tile {index}" if self.tiles else super().name_of(index)

    def read(self, index: int) -> Sample:
        if self.tiles:
            return self.tiles.read(index)
        if not self.in_rows:
            return super().read(index)
        row = self.open(self.files[index][INPUT], self._headers[index][INPUT])
        width = row.width // len(self.names)
        return {
            name: self.reader.arrange(row.crop((left, 0, left + width, row.height)), self.size)
            for name, left in zip(self.names, range(0, row.width, width), strict=True)
            if name != LEFT_OUT
        }

    def region_fields(self, index: int) -> dict[str, RegionField]:
        if not self.in_rows:
            return super().region_fields(index)
        path, (height, whole_width) = self.files[index][INPUT], self._headers[index][INPUT]
        width = whole_width // len(self.names)
        return {
            name: RegionField(path, (height, whole_width), number * width)
            for number, name in enumerate(self.names)
            if name != LEFT_OUT
        }

    def _repeats_input(self, index: int) -> bool:
        """Return whether any target of a sample equals its input, as in rows prepared only for inference."""
        try:
            sample = self.read(index)
        except UserError:  # the error is reported when the sample is used
            return False
        return any(np.array_equal(sample[name], sample[INPUT]) for name in self.spec.panels)

    def encoded(self, index: int) -> Encoded | None:
        return None  # a file contains several panels, so its decoded image is not a sample

    def files_of(self, index: int) -> Encoded | None:
        return None if self.tiles else super().files_of(index)

    def image_size(self, sizes: Sizes) -> tuple[int, int]:
        height, width = sizes[INPUT]
        return height, width // len(self.names) if self.in_rows else width

    def find_problem(self, names: Mapping[str, str], sizes: Sizes) -> Problem | None:
        (height, width), *others = sizes.values()
        if others and others[0] != (height, width):
            first, second = names.values()
            message = f"{first} is {width}×{height} pixels but {second} is {others[0][1]}×{others[0][0]}"
            return Problem(first, SIZES_DIFFER, message)
        count = len(self.names)
        squares = width // height if width % height == 0 else 0
        # In all known datasets, rows of more than two panels consist of squares; pairs can have any shape.
        if not self.in_rows or (width % count == 0 and (count == 2 or squares in (0, count))):
            return None
        hint = f"; the image looks like a row of {squares} panels" if squares > 1 else ""
        kind = f"not a row of {count} equal panels"
        return Problem.of(names[INPUT], f"{width}×{height} pixels is {kind} (set by panels=…){hint}", kind)


def _is_bundled(settings: RunSettings) -> bool:
    """Return whether no folder was given and the default folder has no panels."""
    root = Path(settings.data_root)
    return settings.data_root == RunSettings.data_root and not (
        any((root / name).is_dir() for name in ("train", "trainA")) or (root.is_dir() and images_in(root))
    )


def _tiles(split: str, settings: PanelSettings) -> ArraySource:
    """Return square tiles of the bundled image."""
    check_grey_or_rgb(settings)
    if settings.pixels not in ("auto", "uint8"):
        raise UserError(f"pixels={settings.pixels}: the bundled image is 8-bit; set --data-root to use your own images")
    requested = parse_panels(settings.panels) or tuple(TISSUE)
    unknown = [name for name in requested if name not in (*TISSUE, LEFT_OUT)]
    if unknown:
        raise UserError(
            f"panels={settings.panels}: unknown panel {unknown[0]!r}; without --data-root, use {','.join(TISSUE)}"
        )
    tissue = stained_tissue()
    whole, side = len(tissue[INPUT]), settings.size or TILE_PX
    if 2 * side > whole:
        raise UserError(f"size={side}: the bundled image is only {whole}×{whole} pixels; use at most {whole // 2}")
    places = range(0, whole - side + 1, side)
    corners = [(top, left) for top in places for left in places]
    chosen = [corners[index] for index in fixed_split(len(corners), split)]
    channels = settings.channels or 3
    arrays = {}
    for name in sorted((name for name in requested if name != LEFT_OUT), key=lambda name: name == SEGMENTATION):
        cut = (Image.fromarray(tissue[name][top : top + side, left : left + side]) for top, left in chosen)
        arrays[name] = np.stack([arrange_image(tile, 0, channels) for tile in cut])
    return ArraySource(arrays, DataSpec(channels, side, side, panels=tuple(name for name in arrays if name != INPUT)))


def _find(split: str, settings: PanelSettings) -> tuple[Path, list[Files], list[Problem], bool]:
    """Return a split's folder, its samples, the unmatched files, and whether each file is a row of panels."""
    separate = separate_folder(split, settings, SPLIT_NAMES)
    root = user_path(settings.data_root) if separate is None else separate
    folder_a = split_folder(root, split, PAIR_NAMES)
    if folder_a is not None:
        return root, *_pair(folder_a, folder_a.with_name(f"{folder_a.name[:-1]}B")), False
    folder = separate or split_folder(root, split, SPLIT_NAMES)
    rows: list[Files] = [{INPUT: file} for file in images_in(folder or root)]
    if folder is None and len(rows) == 1:
        raise UserError(
            f"--data-root {root}: one row of panels is too few to train and test on; add more, or set --test-root"
        )
    if folder is None and rows:
        files = [row[INPUT] for row in rows]
        rows = [rows[index] for index in split_files(settings.group_by, root, files, split)]
    return folder or root, rows, [], True


def _pair(folder_a: Path, folder_b: Path) -> tuple[list[Files], list[Problem]]:
    """Match the files in two folders by name; return the pairs and the unmatched files."""
    if not folder_b.is_dir():
        raise UserError(f"--data-root {folder_a.parent}: has a folder {folder_a.name} but no {folder_b.name}; add it")
    first, second = (by_stem(folder, images_in(folder)) for folder in (folder_a, folder_b))
    alone = [one[stem] for one in (first, second) for stem in sorted(first.keys() ^ second.keys()) if stem in one]
    pairs = [{INPUT: first[stem], TARGET: second[stem]} for stem in sorted(first.keys() & second.keys())]
    return pairs, [Problem.no_counterpart(f"{file.parent.name}/{file.name}") for file in alone]


def _default_names(samples: list[Files], in_rows: bool) -> tuple[str, ...]:
    """Return the default names of two panels; raise UserError if there are more, which the user must name."""
    if not in_rows or not samples:
        return INPUT, TARGET
    file = samples[0][INPUT]
    try:
        height, width = image_size(file)
    except BadImage:
        return INPUT, TARGET  # the bad file is reported later, when all headers are read
    if width != 2 * height:
        raise UserError(
            f"{printable(file)}: {width}×{height} pixels is not a row of two square panels; "
            "name its panels from left to right, e.g. --set panels=image,stain,segmentation"
        )
    return INPUT, TARGET
