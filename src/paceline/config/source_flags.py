"""Source settings that are also flags. They are declared here so that `--help` does not import the sources.

To use these settings, a source derives its `Settings` from one of the classes below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.config.settings import RunSettings, setting


@dataclass(frozen=True)
class PixelSettings(RunSettings):
    """Settings for sources whose images may have more than 8 bits per channel."""

    pixels: Literal["auto", "uint8", "uint16", "float32"] = setting(
        "auto",
        "data type of the pixels; auto: that of the first file, but uint8 for 16-bit grey and colour images",
    )
    value_range: str = setting(
        "",
        "pixel values LOW,HIGH that are scaled to -1 and 1; required for floating-point images; "
        "default for integers: the full range, such as 0,65535",
    )


@dataclass(frozen=True)
class SeparateTestFolder(PixelSettings):
    """Settings for sources whose test split may be in a separate folder."""

    test_root: str = setting(
        "",
        "folder with test images (for --data photos, pairs, panels, folder or shards); "
        "--data-root is then used only for training",
        flag=True,
        mutable_on_resume=True,
    )
    group_by: str = setting(
        "",
        "regular expression for file paths; files with the same first group "
        "(or the same match, if there is no group) go into the same split",
    )


@dataclass(frozen=True)
class PhotoSettings(SeparateTestFolder):
    """Settings for sources that may have a second, low-resolution file for every image."""

    low_root: str = setting(
        "",
        "comma-separated folders with low-resolution versions of the images, for --data photos",
        flag=True,
        mutable_on_resume=True,
    )
    low_suffix: str = setting(
        "", "suffix of low-resolution file names, such as _LR, if the images are in the same folder"
    )
    high_suffix: str = setting("", "suffix of high-resolution file names, such as _HR; requires low_suffix")
    test_low_root: str = setting(
        "",
        "comma-separated folders with low-resolution versions of the images in --test-root, for --data photos",
        flag=True,
        mutable_on_resume=True,
    )


SourceFlags = PhotoSettings  # this class has every source setting that is also a flag
FOLDERS = ("low_root", "test_root", "test_low_root")  # settings that belong to a particular --data-root
