"""Panels: several aligned images of the same scene, an input and its targets.

Each file is a row of equally wide panels, as in pix2pix and DeepLIIF (`root/train/*.png`, `root/test/*.png`). If
there are two panels, they can be in separate files (`root/trainA/NAME`, `root/trainB/NAME`, and `testA`, `testB`). For
rows without split folders, a fixed fifth is held out for testing, unless `test_root` is set. The setting `panels` lists
the panels from left to right; `image` is the input, and `-` leaves a panel out. Without a folder, the samples are tiles
of a bundled image of stained tissue, with its separated stains and a mask.
"""

from __future__ import annotations

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
from paceline.data.file_lists import by_stem, fixed_split, images_under, pair_up
from paceline.data.image_files import (
    Files,
    ImageFiles,
    SampleFiles,
    SplitNames,
    find_split,
    separate_folder,
    split_folder,
)
from paceline.data.source import (
    TARGET,
    ArraySource,
    Encoded,
    PanelSettings,
    Sample,
    parse_panels,
)
from paceline.images.decode import BadImage, arrange_image, check_grey_or_rgb
from paceline.images.deep import image_size


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
TILE_PX = 64  # side of a tile in pixels; the bundled image is 512×512


class Panels(ImageFiles):
    """Samples whose "image" is the input and whose other fields, named after the panels, are the targets."""

    Settings = PanelSettings
    split_layouts = (PAIR_NAMES, SPLIT_NAMES)

    def __init__(self, split: str, settings: PanelSettings) -> None:
        self.tiles: ArraySource | None = None  # used instead of files if no folder is given
        if _is_bundled(settings) and not (settings.test_root and split == "test"):
            self.tiles, self.files, self.stored_sizes = _tiles(split, settings), [], {}
            self.spec = self.tiles.spec
            if split == "train":
                self.notes = ("no --data-root: using tiles of the stained-tissue image bundled with Paceline",)
            return
        listed, in_rows = _find(split, settings)
        names = parse_panels(settings.panels) or _default_names(listed.samples if in_rows else [])
        if not in_rows:
            if len(names) != 2 or LEFT_OUT in names:
                raise UserError(
                    f"panels={settings.panels}: the folders A and B contain two panels; set exactly two names"
                )
            samples = [dict(zip(names, files.values(), strict=True)) for files in listed.samples]
            listed = listed._replace(samples=samples)
        super().__init__(listed, split, settings, names if in_rows else (), output_panels(names))

    def __len__(self) -> int:
        return len(self.tiles) if self.tiles else super().__len__()

    def name_of(self, index: int) -> str:
        return f"tile {index}" if self.tiles else super().name_of(index)

    def read(self, index: int) -> Sample:
        return self.tiles.read(index) if self.tiles else super().read(index)

    def files_of(self, index: int) -> Encoded | None:
        return None if self.tiles else super().files_of(index)

    def encoded(self, index: int) -> Encoded | None:
        return None if self.tiles else super().encoded(index)


def _is_bundled(settings: RunSettings) -> bool:
    """Return whether no folder was given and the default folder has no panels."""
    root = Path(settings.data_root)
    return settings.data_root == RunSettings.data_root and not (
        any((root / name).is_dir() for name in ("train", "trainA"))
        or (root.is_dir() and images_under(root, recursive=False))
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


def _find(split: str, settings: PanelSettings) -> tuple[SampleFiles, bool]:
    """Return the samples of a split, and whether each file is a row of panels."""
    root = separate_folder(split, settings, SPLIT_NAMES) or user_path(settings.data_root)
    folder_a = split_folder(root, split, PAIR_NAMES)
    if folder_a is not None:
        return _pair(folder_a, folder_a.with_name(f"{folder_a.name[:-1]}B")), False

    def list_rows(folder: Path) -> tuple[list[Files], tuple[()]]:
        return [{INPUT: file} for file in images_under(folder, recursive=False)], ()

    return find_split(split, settings, SPLIT_NAMES, list_rows), True


def _pair(folder_a: Path, folder_b: Path) -> SampleFiles:
    """Match the files in two folders by name."""
    root = folder_a.parent
    if not folder_b.is_dir():
        raise UserError(f"--data-root {root}: has a folder {folder_a.name} but no {folder_b.name}; add it")
    files = (by_stem(folder, images_under(folder, recursive=False)) for folder in (folder_a, folder_b))
    pairs, unmatched = pair_up(root, *files)
    return SampleFiles(root, [{INPUT: first, TARGET: second} for first, second in pairs], unmatched)


def _default_names(rows: list[Files]) -> tuple[str, ...]:
    """Return the default names of two panels; raise UserError if the rows have more, which the user must name."""
    try:
        height, width = image_size(rows[0][INPUT]) if rows else (1, 2)
    except BadImage:
        return INPUT, TARGET  # the bad file is reported later, when all headers are read
    if width != 2 * height:
        raise UserError(
            f"{printable(rows[0][INPUT])}: {width}×{height} pixels is not a row of two square panels; "
            "name its panels from left to right, e.g. --set panels=image,stain,segmentation"
        )
    return INPUT, TARGET
