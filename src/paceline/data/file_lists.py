"""Image files: which files of a folder they are, and the messages about those that cannot be used."""

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
HIDDEN = (".", "__")  # how names begin that file managers and archives leave behind
MAX_NAMED = 3  # files that a message lists


def named_root(settings: RunSettings) -> Path:
    """Return `--data-root` for a source without files of its own; raise UserError where none was given."""
    root = Path(settings.data_root).expanduser()
    if settings.data_root == RunSettings.data_root and not root.exists():
        raise UserError(f"--data {settings.data}: needs --data-root, the folder of its files")
    return root


def images_in(files: Iterable[Path]) -> list[Path]:
    """Return the files that are images by their suffix, in order."""
    return sorted(file for file in files if file.suffix.lower() in SUFFIXES and not is_hidden(file) and file.is_file())


def images_under(root: Path) -> list[Path]:
    """Return the images in a folder and in all folders inside it, in order, without hidden ones."""
    return images_in(visible_under(root))


def visible_under(root: Path) -> list[Path]:
    """Return all files and folders inside a folder, at any depth, without hidden ones and what is in them."""
    return [
        path for path in root.rglob("*") if not any(part.startswith(HIDDEN) for part in path.relative_to(root).parts)
    ]


def by_stem(root: Path, files: Iterable[Path]) -> dict[str, Path]:
    """Return files by their path under a folder without the suffix, by which files of two folders are matched."""
    found: dict[str, Path] = {}
    for file in files:
        stem = str(file.relative_to(root).with_suffix(""))
        if stem in found:
            raise UserError(f"{found[stem]} and {file.name}: two files of one name; which of them is meant?")
        found[stem] = file
    return found


def is_hidden(path: Path) -> bool:
    """Return whether a file or folder is one that file managers and archives leave behind."""
    return path.name.startswith(HIDDEN)


def unreadable(path: Path, error: BadImage) -> UserError:
    """Return the error for an image file that cannot be used."""
    return UserError(f"{path}: unreadable image ({error}); --bad-images skip leaves such files out")


def first_few(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
