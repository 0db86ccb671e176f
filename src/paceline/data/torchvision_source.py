"""Data sets that torchvision knows: its layout on disk, its downloads and its checksums."""

from __future__ import annotations

import fcntl
import socket
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.data.source import ArraySource
from paceline.images.decode import arrange_pictures, check_picture_settings

SILENCE_LIMIT_SECONDS = 30.0  # a server that does not answer must not hold up the run for ever


class TorchvisionSource(ArraySource):
    """A torchvision data set in memory; a subclass names it and the files it lies in."""

    dataset: ClassVar[str]  # the class in torchvision.datasets
    expected: ClassVar[str]  # its files under --data-root, for the error
    says_split: ClassVar[bool] = False  # its constructor takes split="train" rather than train=True
    channels_first: ClassVar[bool] = False  # its pictures are [n, c, h, w]
    class_names: ClassVar[tuple[str, ...]] = ()  # where torchvision's own will not do
    flip_allowed: ClassVar[bool] = True

    def __init__(self, split: str, settings: RunSettings) -> None:
        check_picture_settings(settings)
        found = self._open(split, Path(settings.data_root).expanduser())
        pictures = np.asarray(found.data)
        if pictures.ndim == 3:
            pictures = pictures[..., np.newaxis]
        elif self.channels_first:
            pictures = pictures.transpose(0, 2, 3, 1)
        pictures = arrange_pictures(pictures, settings)
        labels = np.asarray(found.targets if hasattr(found, "targets") else found.labels)
        names = self.class_names or tuple(found.classes)
        _, height, width, channels = pictures.shape
        super().__init__(
            {"image": pictures, "label": labels.astype(np.int64)},
            DataSpec(
                channels, height, width, num_classes=len(names), class_names=names, flip_allowed=self.flip_allowed
            ),
        )

    def _open(self, split: str, root: Path) -> Any:
        import torchvision.datasets

        name = type(self).__module__.rpartition(".")[2]
        which = {"split": split} if self.says_split else {"train": split == "train"}
        with _one_process_at_a_time(root, name) as may_write, _silence_limit():
            try:
                return getattr(torchvision.datasets, self.dataset)(str(root), download=may_write, **which)
            except (OSError, RuntimeError, EOFError, ValueError, AssertionError, tarfile.TarError) as error:
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                raise UserError(
                    f"--data-root {root}: {name} is not complete there and could not be downloaded ({reason}); "
                    f"put there, whole: {self.expected}"
                ) from error


@contextmanager
def _one_process_at_a_time(root: Path, name: str) -> Iterator[bool]:
    """Whether the folder can be written; while it can, other processes wait until this one is done."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / f".lock-{name}").open("w")
    except OSError:
        lock = None
    if lock is None:  # a read-only folder of data needs no lock, and takes no download
        yield False
    else:
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield True


@contextmanager
def _silence_limit() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SILENCE_LIMIT_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
