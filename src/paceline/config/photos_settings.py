"""The settings of `photos`, in a file that the command line reads for its flags before anything large is imported."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.settings import RunSettings, setting


@dataclass(frozen=True)
class PhotosSettings(RunSettings):
    """Where photographs lie besides `data_root`."""

    low_root: str = setting(
        "",
        "photos: folder with the same pictures in low resolution; several with commas",
        flag=True,
        mutable_on_resume=True,
    )
    test_root: str = setting(
        "", "photos: folder to test on; all of --data-root is then for training", flag=True, mutable_on_resume=True
    )
    test_low_root: str = setting("", "photos: the --low-root of --test-root", flag=True, mutable_on_resume=True)
