"""Images that a command cannot use. They are listed at the end; the other images are still processed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.core.printable import print_line
from paceline.data.file_lists import not_used_file, write_not_used


@dataclass(frozen=True)
class SkippedImage:
    """A file that cannot be used, or an argument that matches no file, with the reason."""

    path: str
    reason: str


def report_skipped(skipped: Sequence[SkippedImage], num_done: int, ignored: Sequence[str], out: Path | None) -> int:
    """Print the images that were skipped, and return the command's exit code.

    A long list is also written to a file alongside `out`, together with ignored folder entries.
    """
    for image in skipped:
        print_line(f"not used: {image.path}: {image.reason}", sys.stderr)
    if skipped:
        total = num_done + len(skipped)
        print_line(f"{num_done} of {total} images were processed; {len(skipped)} could not be used", sys.stderr)
    if out:
        for note in write_not_used(
            not_used_file(out), [*(f"{image.path}: {image.reason}" for image in skipped), *ignored]
        ):
            print_line(note)
    return 1 if skipped else 0


def count_images(count: int) -> str:
    """Return an image count as text, such as "1 image"."""
    return "1 image" if count == 1 else f"{count:,} images"
