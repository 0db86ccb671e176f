"""Settings of sources that are also flags, separate from the sources so that the command line starts fast.

A source uses them by deriving its `Settings` from one of these classes.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.settings import RunSettings, setting


@dataclass(frozen=True)
class SeparateTestFolder(RunSettings):
    """For sources whose test split may be in a separate folder."""

    test_root: str = setting(
        "",
        "photos, pairs, panels, folder: folder to test on; all of --data-root is then used for training",
        flag=True,
        mutable_on_resume=True,
    )
    group_by: str = setting(
        "", "regular expression; files with the same first group (or match) in their paths are in the same split"
    )


@dataclass(frozen=True)
class PhotoSettings(SeparateTestFolder):
    """For sources that may have a second, low-resolution file for every image."""

    low_root: str = setting(
        "",
        "photos: comma-separated folders with the same images in low resolution",
        flag=True,
        mutable_on_resume=True,
    )
    low_suffix: str = setting("", "suffix of low-resolution file names in the same folder, such as _LR")
    high_suffix: str = setting("", "suffix of high-resolution file names, such as _HR; requires low_suffix")
    test_low_root: str = setting(
        "", "photos: like --low-root, but for the images in --test-root", flag=True, mutable_on_resume=True
    )


SourceFlags = PhotoSettings  # includes every source setting that is a flag
FOLDERS = ("low_root", "test_root", "test_low_root")  # these settings belong to a particular --data-root
