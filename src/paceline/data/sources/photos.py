"""Photographs of any size in a folder. Without `--data-root`, photographs that ship with Paceline are used.

`root/train` and `root/test`, or DIV2K's folders, are used as they are. In other folders, a fixed fifth of
the images is held out for testing, unless `test_root` is set. Low-resolution files are read from `low_root`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from paceline.config.flags import PhotoSettings
from paceline.config.settings import RunSettings
from paceline.contracts.data_spec import INPUT
from paceline.core.errors import UserError
from paceline.core.files import user_path
from paceline.core.text import printable
from paceline.data.bundled import FOLDER
from paceline.data.file_lists import (
    SCALE,
    by_suffix,
    check_independent,
    existing_folder,
    first_few,
    images_under,
    pair_up,
)
from paceline.data.image_files import Files, ImageFiles, SampleFiles, SplitNames, find_split
from paceline.data.source import LOW

SPLIT_NAMES: SplitNames = {"train": ("train", "DIV2K_train_HR"), "test": ("test", "DIV2K_valid_HR", "valid", "val")}
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
        _check_low_settings(settings)
        has_low = settings.low_root or settings.low_suffix  # there are no such versions of the bundled photographs
        if _is_bundled(settings) and not has_low and not (settings.test_root and split == "test"):
            listed = SampleFiles(FOLDER, [{INPUT: FOLDER / name} for name in EMBEDDED[split]])
            photographs = f"{len(listed.samples)} photographs bundled with Paceline"
            self.notes = (f"{split}: using {photographs}; set --data-root to use your own",)
        else:
            listed = _find(split, settings)
        super().__init__(listed, split, settings)


def _check_low_settings(settings: PhotoSettings) -> None:
    """Raise UserError if the settings for low-resolution files contradict each other."""
    if settings.high_suffix and not settings.low_suffix:
        raise UserError(
            f"high_suffix={settings.high_suffix}: requires low_suffix, the suffix of the low-resolution files"
        )
    if settings.low_suffix and (settings.low_root or settings.test_low_root):
        raise UserError(f"low_suffix={settings.low_suffix}: cannot be combined with --low-root; set one of them")
    if settings.test_low_root and not settings.test_root:
        raise UserError("--test-low-root: needs --test-root; use --low-root for the images in --data-root")


def _find(split: str, settings: PhotoSettings) -> SampleFiles:
    """Return the samples of a split."""
    is_separate_test = bool(settings.test_root) and split == "test"
    flag, low_roots = "--data-root", settings.low_root
    if is_separate_test:
        flag, low_roots = "--test-root", settings.test_low_root
    if settings.size and (low_roots or settings.low_suffix):
        raise UserError(f"size={settings.size}: not supported with low-resolution files; use --set size=0")

    def list_samples(folder: Path) -> tuple[list[Files], list[str]]:
        files = images_under(folder)
        if settings.low_suffix:
            high, low, problems = by_suffix(folder, files, settings.high_suffix, settings.low_suffix)
            problems += pair_up(folder, high, low)[1]
            matched = {file: {INPUT: file} | ({LOW: low[key]} if key in low else {}) for key, file in high.items()}
            return [matched[file] for file in sorted(matched)], problems
        check_independent(folder, files, flag)
        return [{INPUT: file} for file in files], []

    listed = find_split(split, settings, SPLIT_NAMES, list_samples)
    if settings.low_suffix:
        return listed._replace(samples=[files for files in listed.samples if LOW in files])
    return _with_low(listed, low_roots) if low_roots else listed


def _is_bundled(settings: RunSettings) -> bool:
    """Return whether no folder was given and the default folder has no images."""
    return settings.data_root == RunSettings.data_root and not (
        Path(settings.data_root).is_dir() and images_under(Path(settings.data_root))
    )


def _low_files(roots: str) -> list[tuple[Path, Path]]:
    """Return every image in the folders, with the folder it is in."""
    folders = [existing_folder(user_path(root.strip()), "--low-root") for root in roots.split(",")]
    return [(folder, file) for folder in folders for file in images_under(folder)]


def _with_low(listed: SampleFiles, low_roots: str) -> SampleFiles:
    """Match images with low-resolution files by name, or by path if names repeat."""
    by_name: dict[str, list[tuple[Path, Path]]] = {}
    for low_root, file in _low_files(low_roots):
        for name in {file.stem, _without_scale(file)}:
            by_name.setdefault(name, []).append((low_root, file))
    samples, problems = [], []
    for path in (files[INPUT] for files in listed.samples):
        matches = by_name.get(path.stem) or by_name.get(_without_scale(path), [])
        here = path.relative_to(listed.root.parent).parent  # a low-resolution path may omit the split's folder
        places = (here, here.relative_to(listed.root.name))
        if len(matches) > 1:
            matches = [(base, file) for base, file in matches if file.relative_to(base).parent in places] or matches
        if len(matches) > 1:
            matches = [(base, file) for base, file in matches if file.stem == path.stem] or matches
        if len(matches) > 1:
            named = first_few([str(file) for _, file in matches])
            raise UserError(
                f"--low-root {low_roots}: several files match {printable(path.name)}: {named}; keep only one"
            )
        if matches:
            samples.append({INPUT: path, LOW: matches[0][1]})
        else:
            problems.append(f"{path.relative_to(listed.root)} has no matching file in --low-root {low_roots}")
    return SampleFiles(listed.root, samples, problems)


def _without_scale(path: Path) -> str:
    return SCALE.sub("", path.stem)
