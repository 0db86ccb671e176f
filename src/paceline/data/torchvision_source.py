"""Base class for torchvision's datasets; torchvision downloads the files and verifies their checksums."""

from __future__ import annotations

import math
import socket
import tarfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError, missing
from paceline.core.files import Lock, user_path
from paceline.core.registry import is_installed
from paceline.data.file_lists import check_not_a_file
from paceline.data.source import ArraySource
from paceline.images.decode import arrange_images, check_grey_or_rgb

SILENCE_LIMIT_SECONDS = 30.0  # network timeout for downloads


class TorchvisionSource(ArraySource):
    """A torchvision dataset in memory; a subclass defines which one."""

    dataset: ClassVar[str]  # name of the class in torchvision.datasets
    expected: ClassVar[str]  # files expected under --data-root, for the error message
    has_split_argument: ClassVar[bool] = False  # whether the constructor takes split="train" instead of train=True
    channels_first: ClassVar[bool] = False  # whether the image array has the shape [n, c, h, w]
    class_names: ClassVar[tuple[str, ...]] = ()  # replaces torchvision's names if they are missing or unsuitable
    flip_allowed: ClassVar[bool] = True
    package: ClassVar[str] = ""  # additional module that torchvision needs to read the files, if any
    extra: ClassVar[str] = ""  # Paceline extra that installs `package`

    def __init__(self, split: str, settings: RunSettings) -> None:
        check_grey_or_rgb(settings)
        if not is_installed(self.package):  # checked here, since torchvision would fail only after the download
            raise UserError(f"--data {settings.data}: {missing(self.package, self.extra)}")
        found = self._open(split, user_path(settings.data_root))
        images = np.asarray(found.data)
        if images.ndim == 3:
            images = images[..., np.newaxis]
        elif self.channels_first:
            images = images.transpose(0, 2, 3, 1)
        images = arrange_images(images, settings)
        labels = np.asarray(found.targets if hasattr(found, "targets") else found.labels)
        names = self.class_names or tuple(found.classes)
        _, height, width, channels = images.shape
        super().__init__(
            {"image": images, "label": labels.astype(np.int64)},
            DataSpec(
                channels, height, width, num_classes=len(names), class_names=names, flip_allowed=self.flip_allowed
            ),
        )

    def _open(self, split: str, root: Path) -> Any:
        import torchvision.datasets

        check_not_a_file(root, "--data-root")
        name = type(self).__module__.rpartition(".")[2]
        which = {"split": split} if self.has_split_argument else {"train": split == "train"}
        lock, timeout = _lock(root, name), socket.getdefaulttimeout()
        socket.setdefaulttimeout(SILENCE_LIMIT_SECONDS)
        try:
            return getattr(torchvision.datasets, self.dataset)(str(root), download=lock is not None, **which)
        except (OSError, RuntimeError, EOFError, ValueError, AssertionError, tarfile.TarError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise UserError(
                f"--data-root {root}: {name} is missing or incomplete and could not be downloaded ({reason}); "
                f"put these files in that folder: {self.expected}"
            ) from error
        finally:
            socket.setdefaulttimeout(timeout)
            if lock is not None:
                lock.release()


def _lock(root: Path, name: str) -> Lock | None:
    """Lock a folder while a data set is downloaded; return None if the folder is read-only, which needs no lock."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        return Lock(root, f".lock-{name}", wait_seconds=math.inf)
    except OSError:
        return None
