"""Photographs of any size in a folder. Without `--data-root`, photographs that ship with Paceline are used.

`root/train` and `root/test`, or DIV2K's folders, are used as they are. In other folders, a fixed fifth of
the images is held out for testing, unless `test_root` is set. Low-resolution files are read from `low_root`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from paceline.config.flags import PhotoSettings
from paceline.config.settings import RunSettings
from paceline.core.errors import UserError
from paceline.core.files import user_path
from paceline.core.text import printable
from paceline.data.bundled import FOLDER
from paceline.data.file_lists import SCALE, SIZES_DIFFER, Problem, by_suffix, check_independent, first_few, images_under
from paceline.data.image_files import Files, ImageFiles, Sizes, SplitNames, separate_folder, split_folder
from paceline.data.source import Sample, split_files
from paceline.images.decode import BadImage, unlimited
from paceline.images.readers import image_size

SPLIT_NAMES: SplitNames = {"train": ("train", "DIV2K_train_HR"), "test": ("test", "DIV2K_valid_HR", "valid", "val")}
SEEN_FOR_SCALE = 20  # number of images used to find the ratio of high to low resolution
EMBEDDED = {  # bundled files; the two photographs of one motorcycle must be in the same split
    "train": (
        *("astronaut.webp", "brick.png", "camera.png", "clock_motion.png", "coins.png", "grass.png", "gravel.png"),
        *("hubble_deep_field.jpg", "ihc.webp", "moon.png", "motorcycle_left.webp", "motorcycle_right.webp"),
        "retina.jpg",
    ),
    "test": ("chelsea.webp", "coffee.webp", "rocket.jpg"),
}


class Photos(ImageFiles):
    """Colour photographs of any size, with a field "low" if there are low-resolution files."""

    Settings = PhotoSettings
    split_layouts = (SPLIT_NAMES,)

    @classmethod
    def measure_whole(cls, settings: RunSettings) -> RunSettings:
        whole = super().measure_whole(settings)
        assert isinstance(whole, PhotoSettings)
        return whole if whole == settings else dataclasses.replace(whole, test_low_root=whole.low_root)

    def __init__(self, split: str, settings: PhotoSettings) -> None:
        root, paths, low_roots = _find(split, settings)
        self.scale = 0
        problems: list[Problem] = []
        samples: list[Files] = [{"image": path} for path in paths]
        if low_roots or settings.low_suffix:
            if settings.size:
                raise UserError(f"size={settings.size}: not supported with low-resolution files; use --set size=0")
            if settings.low_suffix:
                samples, problems = _with_low_in_folder(root, paths, settings)
            else:
                samples, problems = _with_low(root, paths, _low_files(low_roots), low_roots)
            self.scale = _find_scale(samples)
        super().__init__(root, samples, split, settings, problems)
        self.spec = dataclasses.replace(self.spec, scale=self.scale)
        if _is_bundled(settings) and not (settings.test_root and split == "test"):
            self.notes += (
                f"{split}: using {len(self)} photographs bundled with Paceline; set --data-root to use your own",
            )

    def read(self, index: int) -> Sample:
        sample = super().read(index)
        if self.scale:
            height, width = self.image_size(self._headers[index])
            sample["image"] = sample["image"][:height, :width]
        return sample

    def image_size(self, sizes: Sizes) -> tuple[int, int]:
        """Return the size of "image", which is cropped at the right and bottom to a multiple of the size of "low"."""
        if not self.scale:
            return sizes["image"]
        height, width = sizes["low"]
        return height * self.scale, width * self.scale

    def find_problem(self, names: Mapping[str, str], sizes: Sizes) -> Problem | None:
        ratio = _ratio(sizes) if self.scale else 0
        if ratio == self.scale:
            return None
        (height, width), (low_height, low_width) = sizes["image"], sizes["low"]
        low = f"{names['low']}: {low_width}×{low_height} pixels"
        whole = f"{names['image']} ({width}×{height})"
        message = f"{low} cannot be upscaled by a whole-number factor to {whole}: do they show the same image?"
        if ratio > 1:
            message = f"{low} is 1/{ratio} of {whole}, but the ratio for other files is 1/{self.scale}"
        return Problem(names["image"], SIZES_DIFFER, message)


def _high_files(root: Path, settings: PhotoSettings, flag: str = "--data-root") -> list[Path]:
    """Return the images under a folder, excluding low-resolution files; `flag` is the option that named the folder."""
    files = images_under(root)
    if not settings.low_suffix:
        check_independent(root, files, flag)
        return files
    high, _, _ = by_suffix(root, files, settings.high_suffix, settings.low_suffix)
    return sorted(high.values())


def _with_low_in_folder(root: Path, paths: list[Path], settings: PhotoSettings) -> tuple[list[Files], list[Problem]]:
    """Match images with low-resolution files in the same folder; also list files without a match."""
    high, low, problems = by_suffix(root, images_under(root), settings.high_suffix, settings.low_suffix)
    keys = {file: key for key, file in high.items() if key in low}
    return [{"image": path, "low": low[keys[path]]} for path in paths if path in keys], problems


def _find(split: str, settings: PhotoSettings) -> tuple[Path, list[Path], str]:
    """Return the split's root, its files, and the folders with low-resolution files."""
    if settings.high_suffix and not settings.low_suffix:
        raise UserError(
            f"high_suffix={settings.high_suffix}: requires low_suffix, the suffix of the low-resolution files"
        )
    if settings.low_suffix and (settings.low_root or settings.test_low_root):
        raise UserError(f"low_suffix={settings.low_suffix}: cannot be combined with --low-root; set one of them")
    if settings.test_low_root and not settings.test_root:
        raise UserError("--test-low-root: needs --test-root; use --low-root for the images in --data-root")
    if _is_bundled(settings) and not (settings.test_root and split == "test"):
        return FOLDER, [FOLDER / name for name in EMBEDDED[split]], ""
    separate = separate_folder(split, settings, SPLIT_NAMES)
    if separate is not None:
        return (
            separate,
            _high_files(separate, settings, "--test-root" if split == "test" else "--data-root"),
            settings.test_low_root if split == "test" else settings.low_root,
        )
    root = user_path(settings.data_root)
    split_root = split_folder(root, split, SPLIT_NAMES)
    if split_root is not None:
        return split_root, _high_files(split_root, settings), settings.low_root
    paths = _high_files(root, settings)
    if len(paths) == 1:
        raise UserError(f"--data-root {root}: one image is too few to train and test on; add more, or set --test-root")
    if paths:
        paths = [paths[index] for index in split_files(settings.group_by, root, paths, split)]
    return root, paths, settings.low_root


def _is_bundled(settings: RunSettings) -> bool:
    """Return whether no folder was given and the default folder has no images."""
    return settings.data_root == RunSettings.data_root and not (
        Path(settings.data_root).is_dir() and images_under(Path(settings.data_root))
    )


def _low_files(roots: str) -> list[tuple[Path, Path]]:
    """Return every image in the folders, with the folder it was found in."""
    found = []
    for root in (user_path(one.strip()) for one in roots.split(",")):
        if not root.is_dir():
            raise UserError(f"--low-root {root}: no such folder")
        found += [(root, file) for file in images_under(root)]
    return found


def _with_low(
    root: Path, paths: list[Path], low_files: list[tuple[Path, Path]], low_roots: str
) -> tuple[list[Files], list[Problem]]:
    """Match images with low-resolution files by name, or by path if names repeat; also list unmatched images."""
    by_name: dict[str, list[tuple[Path, Path]]] = {}
    for low_root, file in low_files:
        for name in {file.stem, _without_scale(file)}:
            by_name.setdefault(name, []).append((low_root, file))
    samples, problems = [], []
    for path in paths:
        found = by_name.get(path.stem) or by_name.get(_without_scale(path), [])
        if len(found) > 1:
            here = path.relative_to(root.parent).parent  # a low-resolution path may omit the split's folder
            places = (here, here.relative_to(root.name))
            found = [(base, file) for base, file in found if file.relative_to(base).parent in places] or found
        if len(found) > 1:
            found = [(base, file) for base, file in found if file.stem == path.stem] or found
        if len(found) > 1:
            named = first_few([str(file) for _, file in found])
            raise UserError(
                f"--low-root {low_roots}: several files match {printable(path.name)}: {named}; keep only one"
            )
        if found:
            samples.append({"image": path, "low": found[0][1]})
        else:
            name, kind = str(path.relative_to(root)), f"no matching file in --low-root {low_roots}"
            problems.append(Problem(name, kind, f"{name} has {kind}"))
    return samples, problems


def _without_scale(path: Path) -> str:
    return SCALE.sub("", path.stem)


def _find_scale(samples: list[Files]) -> int:
    """Return the most common ratio of high to low resolution among the first files; 0 if none can be read."""
    ratios = []
    for files in samples[:SEEN_FOR_SCALE]:
        try:
            ratios.append(_ratio({name: image_size(path, unlimited) for name, path in files.items()}))
        except BadImage:
            continue  # the file is reported later, with all other bad files
    whole = [ratio for ratio in ratios if ratio > 1]
    if ratios and not whole:
        image, low = (printable(samples[0][name]) for name in ("image", "low"))
        raise UserError(f"--low-root: {image} must be larger than {low} by a whole-number factor, such as 4")
    return max(whole, key=whole.count, default=0)


def _ratio(sizes: Sizes) -> int:
    """Return the integer ratio of the two sizes, allowing a remainder smaller than the ratio; 0 if no ratio fits."""
    (height, width), (low_height, low_width) = sizes["image"], sizes["low"]
    ratio = height // low_height
    return ratio if ratio == width // low_width and max(height % low_height, width % low_width) < ratio else 0
