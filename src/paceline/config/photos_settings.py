"""The settings of the source `photos`, in a file that the command line reads for its flags without importing torch."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.settings import RunSettings, setting


@dataclass(frozen=True)
class PhotosSettings(RunSettings):
    """Where photos lie besides `data_root`."""

    low_root: str = setting(
        "",
        "photos: folder with the same images in low resolution; separate several with commas",
        flag=True,
        mutable_on_resume=True,
    )
    test_root: str = setting(
        "",
        "photos: folder with the test images; all of --data-root is then used for training",
        flag=True,
        mutable_on_resume=True,
    )
    test_low_root: str = setting(
        "", "photos: folder with the images of --test-root in low resolution", flag=True, mutable_on_resume=True
    )
