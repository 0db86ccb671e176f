"""Finds the image files in a folder, and formats messages about files that cannot be used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from paceline.config.settings import RunSettings
from paceline.core.errors import UserError
from paceline.images.decode import BadImage

SUFFIXES = {
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".jp2", ".j2k", ".png", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".qoi"),
}
HIDDEN = (".", "__")  # prefixes of hidden files, and of those that file managers and archives leave behind
MAX_NAMED = 3  # maximum number of files listed in a message


def named_root(settings: RunSettings) -> Path:
    """Return `--data-root` for a source without bundled data; raise UserError if it was not given."""
    root = Path(settings.data_root).expanduser()
    if settings.data_root == RunSettings.data_root and not root.exists():
        raise UserError(f"--data {settings.data}: needs --data-root; pass the path of your data")
    return root


def images_in(files: Iterable[Path]) -> list[Path]:
    """Return the visible files with an image suffix, sorted."""
    return sorted(file for file in files if file.suffix.lower() in SUFFIXES and not is_hidden(file) and file.is_file())


def images_under(root: Path) -> list[Path]:
    """Return all visible images in a folder and its subfolders, sorted."""
    return images_in(visible_under(root))


def visible_under(root: Path) -> list[Path]:
    """Return all files and folders under a folder, at any depth, except hidden ones and their contents."""
    return [
        path for path in root.rglob("*") if not any(part.startswith(HIDDEN) for part in path.relative_to(root).parts)
    ]


def by_stem(root: Path, files: Iterable[Path]) -> dict[str, Path]:
    """Index files by their relative path without suffix, which is used to match the files of two folders."""
    found: dict[str, Path] = {}
    for file in files:
        stem = str(file.relative_to(root).with_suffix(""))
        if stem in found:
            raise UserError(f"{found[stem]} and {file.name}: two files with the same name; remove one of them")
        found[stem] = file
    return found


def is_hidden(path: Path) -> bool:
    """Return whether a file or folder is hidden, or was left behind by a file manager or an archive."""
    return path.name.startswith(HIDDEN)


def unreadable(path: Path, error: BadImage) -> UserError:
    """Return the error for an image file that cannot be used."""
    return UserError(f"{path}: unreadable image ({error}); use --bad-images skip to leave such files out")


def first_few(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
