"""Photographs of any sizes in a folder; without `--data-root`, those that ship inside scikit-image.

`root/train` and `root/test`, or DIV2K's folders, are used as they are; of other folders a fixed fifth is kept for
testing, unless `test_root` names other pictures for that. Files of lower resolution come from `low_root`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from paceline.config.photos_settings import PhotosSettings
from paceline.config.settings import RunSettings
from paceline.core.errors import UserError
from paceline.data.file_lists import first_few, pictures_under
from paceline.data.fixed_split import fixed_split
from paceline.data.image_files import Files, PictureFiles, Sizes, split_folder
from paceline.data.source import Sample
from paceline.images.decode import BadPicture, upright_size

SPLIT_NAMES = {"train": ("train", "DIV2K_train_HR"), "test": ("test", "DIV2K_valid_HR", "valid", "val")}
SCALE_SUFFIX = re.compile(r"(?i)[-_]?(?:x\d+|lr|hr|\dx)$")  # 0001x4 is the small 0001
SEEN_FOR_SCALE = 20  # pictures that say by how much the files in low resolution are smaller
EMBEDDED = {  # two views of one motorcycle are in one split
    "train": (
        *("astronaut.png", "brick.png", "camera.png", "clock_motion.png", "coins.png", "grass.png", "gravel.png"),
        *("hubble_deep_field.jpg", "ihc.png", "moon.png", "motorcycle_left.png", "motorcycle_right.png", "retina.jpg"),
    ),
    "test": ("chelsea.png", "coffee.png", "rocket.jpg"),
}


class Photos(PictureFiles):
    """Colour photographs of mixed sizes, with "low" beside "image" where there are files of it."""

    Settings = PhotosSettings

    def __init__(self, split: str, settings: PhotosSettings) -> None:
        root, paths, low_roots = _find(split, settings)
        self.scale = 0
        problems: list[str] = []
        samples: list[Files] = [{"image": path} for path in paths]
        if low_roots:
            if settings.size:
                raise UserError(f"size={settings.size}: pictures with files in low resolution keep their size")
            samples, problems = _with_low(root, paths, _low_files(low_roots), low_roots)
            self.scale = _find_scale(samples)
        super().__init__(root, samples, split, settings, problems)
        self.spec = dataclasses.replace(self.spec, scale=self.scale)
        if _is_embedded(settings) and not (settings.test_root and split == "test"):
            self.notes += (f"{split}: {len(self)} photographs from scikit-image; --data-root names your own",)

    def read(self, index: int) -> Sample:
        sample = super().read(index)
        if self.scale:
            height, width = self.image_size(self._headers[index])
            sample["image"] = sample["image"][:height, :width]
        return sample

    def image_size(self, sizes: Sizes) -> tuple[int, int]:
        """Where the larger picture is no multiple of the smaller one, it is cut at its right and lower edge."""
        if not self.scale:
            return sizes["image"]
        height, width = sizes["low"]
        return height * self.scale, width * self.scale

    def find_fault(self, names: Mapping[str, str], sizes: Sizes) -> str:
        ratio = _ratio(sizes) if self.scale else 0
        if ratio == self.scale:
            return ""
        (height, width), (low_height, low_width) = sizes["image"], sizes["low"]
        found = f"1/{ratio}" if ratio > 1 else "no whole fraction"
        whole = f"the {width}×{height} of {names['image']}"
        remark = f", where others are 1/{self.scale}" if ratio > 1 else " (is it the same picture?)"
        return f"{names['low']}: {low_width}×{low_height} pixels are {found} of {whole}{remark}"


def _find(split: str, settings: PhotosSettings) -> tuple[Path, list[Path], str]:
    """The split's root, its files, and where the same pictures lie in low resolution."""
    if settings.test_root and split == "test":
        root = Path(settings.test_root).expanduser()
        if not root.is_dir():
            raise UserError(f"--test-root {root}: no such folder")
        return root, pictures_under(root), settings.test_low_root
    if settings.test_low_root and not settings.test_root:
        raise UserError("--test-low-root: belongs to --test-root; --low-root is for all of --data-root")
    if _is_embedded(settings):
        return *_embedded(split), ""
    root = Path(settings.data_root).expanduser()
    if settings.test_root:
        if not root.is_dir():
            raise UserError(f"--data-root {root}: no such folder")
        root = next((root / name for name in SPLIT_NAMES["train"] if (root / name).is_dir()), root)
        return root, pictures_under(root), settings.low_root
    split_root = split_folder(root, split, SPLIT_NAMES)
    if split_root is not None:
        return split_root, pictures_under(split_root), settings.low_root
    paths = pictures_under(root)
    if len(paths) == 1:
        raise UserError(f"--data-root {root}: one picture is too few for a train and a test split; see --test-root")
    return root, [paths[index] for index in fixed_split(len(paths), split)] if paths else [], settings.low_root


def _is_embedded(settings: RunSettings) -> bool:
    """Whether no other pictures were named: the folder that every source looks into by default has none."""
    return settings.data_root == RunSettings.data_root and not pictures_under(Path(settings.data_root))


def _embedded(split: str) -> tuple[Path, list[Path]]:
    spec = find_spec("skimage")
    if spec is None or spec.origin is None:
        raise UserError("photos without --data-root come from scikit-image: pip install scikit-image")
    root = Path(spec.origin).parent / "data"
    return root, [root / name for name in EMBEDDED[split] if (root / name).is_file()]


def _low_files(roots: str) -> list[tuple[Path, Path]]:
    """Every picture in the folders, with the folder that it was found in."""
    found = []
    for root in (Path(one.strip()).expanduser() for one in roots.split(",")):
        if not root.is_dir():
            raise UserError(f"--low-root {root}: no such folder")
        found += [(root, file) for file in pictures_under(root)]
    return found


def _with_low(
    root: Path, paths: list[Path], low_files: list[tuple[Path, Path]], low_roots: str
) -> tuple[list[Files], list[str]]:
    """Each picture with its file of low resolution, by name and, where names repeat, by path; and what has none."""
    by_name: dict[str, list[tuple[Path, Path]]] = {}
    for low_root, file in low_files:
        for name in {file.stem, _without_scale(file)}:
            by_name.setdefault(name, []).append((low_root, file))
    samples, problems = [], []
    for path in paths:
        found = by_name.get(path.stem) or by_name.get(_without_scale(path), [])
        if len(found) > 1:
            here = path.relative_to(root.parent).parent  # with the folder of the split, or without
            places = (here, here.relative_to(root.name))
            found = [(base, file) for base, file in found if file.relative_to(base).parent in places] or found
        if len(found) > 1:
            found = [(base, file) for base, file in found if file.stem == path.stem] or found
        if len(found) > 1:
            named = first_few([str(file) for _, file in found])
            raise UserError(f"--low-root {low_roots}: {path.name} could be any of {named}")
        if found:
            samples.append({"image": path, "low": found[0][1]})
        else:
            problems.append(f"{path.relative_to(root)} has no file in --low-root {low_roots}")
    return samples, problems


def _without_scale(path: Path) -> str:
    return SCALE_SUFFIX.sub("", path.stem)


def _find_scale(samples: list[Files]) -> int:
    """By how much the files are smaller: what most of the first ones say; 0 where none is a whole fraction."""
    ratios = []
    for files in samples[:SEEN_FOR_SCALE]:
        try:
            ratios.append(_ratio({name: upright_size(path) for name, path in files.items()}))
        except BadPicture:
            continue  # it is named later, with all others
    whole = [ratio for ratio in ratios if ratio > 1]
    if ratios and not whole:
        image, low = samples[0]["image"], samples[0]["low"]
        raise UserError(f"--low-root: {low} is not a whole fraction of {image} (e.g. 1/4 of its height and width)")
    return max(whole, key=whole.count, default=0)


def _ratio(sizes: Sizes) -> int:
    """How many times the one size is in the other, with less than that left over; 0 where it is not."""
    (height, width), (low_height, low_width) = sizes["image"], sizes["low"]
    ratio = height // low_height
    return ratio if ratio == width // low_width and max(height % low_height, width % low_width) < ratio else 0
