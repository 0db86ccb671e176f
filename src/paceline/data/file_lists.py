"""Files with pictures: which they are, and what is said about those that cannot be used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from paceline.config.settings import RunSettings
from paceline.core.errors import UserError
from paceline.images.decode import BadPicture

SUFFIXES = {
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".jp2", ".j2k", ".png", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".qoi"),
}
HIDDEN = (".", "__")  # names of what file managers and archives leave behind begin so
NAMED_AT_MOST = 3  # of the files that something is said about


def named_root(settings: RunSettings) -> Path:
    """What `--data-root` names, for a source that has no files of its own; it is missed where nobody named anything."""
    root = Path(settings.data_root).expanduser()
    if settings.data_root == RunSettings.data_root and not root.exists():
        raise UserError(f"--data {settings.data}: needs --data-root, which says where its files are")
    return root


def pictures_in(files: Iterable[Path]) -> list[Path]:
    """Those of the files that are pictures by their suffix, in order."""
    return sorted(file for file in files if file.suffix.lower() in SUFFIXES and not is_hidden(file) and file.is_file())


def pictures_under(root: Path) -> list[Path]:
    """The pictures in a folder and in all folders inside it, in order; hidden folders are passed over."""
    return pictures_in(visible_under(root))


def visible_under(root: Path) -> list[Path]:
    """Files and folders in a folder and in all folders inside it; hidden ones and what is in them are passed over."""
    return [
        path for path in root.rglob("*") if not any(part.startswith(HIDDEN) for part in path.relative_to(root).parts)
    ]


def by_stem(root: Path, files: Iterable[Path]) -> dict[str, Path]:
    """Files by their path under a folder without the suffix, by which those of two folders belong together."""
    found: dict[str, Path] = {}
    for file in files:
        stem = str(file.relative_to(root).with_suffix(""))
        if stem in found:
            raise UserError(f"{found[stem]} and {file.name}: two files of one name; which of them is meant?")
        found[stem] = file
    return found


def is_hidden(path: Path) -> bool:
    """Whether a file or folder is what file managers and archives leave behind."""
    return path.name.startswith(HIDDEN)


def unreadable(path: Path, error: BadPicture) -> UserError:
    """The one line about a picture that cannot be used."""
    return UserError(f"{path}: unreadable image ({error}); --bad-images skip leaves such files out")


def first_few(names: Sequence[str]) -> str:
    """Some names, and how many more there are."""
    more = len(names) - NAMED_AT_MOST
    return ", ".join(names[:NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")
