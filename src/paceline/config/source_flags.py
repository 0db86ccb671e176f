"""Settings of sources that are also flags: the command line reads them here before it imports anything large.

A source takes them by making one of these classes its `Settings`.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.settings import RunSettings, setting


@dataclass(frozen=True)
class SeparateTestFolder(RunSettings):
    """For sources whose test split may be in a folder of its own."""

    test_root: str = setting(
        "",
        "photos, pairs, panels: folder to test on; all of --data-root is then for training",
        flag=True,
        mutable_on_resume=True,
    )


@dataclass(frozen=True)
class PhotoSettings(SeparateTestFolder):
    """For sources that may have a second, smaller file for every image."""

    low_root: str = setting(
        "",
        "photos: folder with the same images in low resolution; separate several with commas",
        flag=True,
        mutable_on_resume=True,
    )
    test_low_root: str = setting("", "photos: the --low-root of --test-root", flag=True, mutable_on_resume=True)


SourceFlags = PhotoSettings  # has every setting of a source that is a flag
FOLDERS = ("low_root", "test_root", "test_low_root")  # these belong to one --data-root and not to another
