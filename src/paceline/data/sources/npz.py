"""Your own arrays: one .npz file with x_train, y_train, x_test and y_test."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.data.file_lists import named_root
from paceline.data.source import ArraySource
from paceline.images.decode import arrange_images


class Npz(ArraySource):
    """uint8 images [n, h, w] or [n, h, w, 1 or 3] and integer labels [n]; `--data-root` is the path to the file."""

    def __init__(self, split: str, settings: RunSettings) -> None:
        file = _find(named_root(settings))
        arrays = _read(file, (f"x_{split}", "y_train", "y_test"))
        labels = {key: _labels(file, key, array) for key, array in arrays.items() if key.startswith("y_")}
        images = _images(file, f"x_{split}", arrays[f"x_{split}"])
        own_labels = labels[f"y_{split}"]
        if len(images) != len(own_labels):
            raise UserError(f"{file}: x_{split} has {len(images)} rows but y_{split} has {len(own_labels)}")
        images = arrange_images(images, settings)
        _, height, width, channels = images.shape
        num_classes = 1 + max(int(array.max(initial=0)) for array in labels.values())
        super().__init__({"image": images, "label": own_labels}, DataSpec(channels, height, width, num_classes))


def _find(root: Path) -> Path:
    if root.is_file():
        return root
    files = sorted(file for file in root.glob("*.npz") if file.is_file())
    if len(files) == 1:
        return files[0]
    found = f"has {len(files)} .npz files" if root.is_dir() else "no such file"
    raise UserError(f"--data-root {root}: {found}; expected the path to a single .npz file")


def _read(file: Path, keys: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    try:
        archive = np.load(file, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("a single array, not an .npz archive")
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{file}: not a readable .npz file ({_one_line(error)})") from error
    arrays = {}
    with archive:
        for key in keys:
            if key not in archive:
                raise UserError(f"{file}: has no {key}; expected x_train, y_train, x_test and y_test")
            try:
                arrays[key] = archive[key]
            except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
                raise UserError(f"{file}: {key} cannot be read ({_one_line(error)})") from error
    return arrays


def _images(file: Path, key: str, array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype != np.uint8:
        raise UserError(f"{file}: {key} is {array.dtype}; expected uint8 (0 is black, 255 is white)")
    if array.ndim == 3:
        array = array[..., np.newaxis]
    if array.ndim != 4 or array.shape[-1] not in (1, 3):
        raise UserError(f"{file}: {key} has shape {array.shape}; expected [n, h, w] or [n, h, w, 1 or 3]")
    if array.size == 0:
        raise UserError(f"{file}: {key} is empty, with shape {array.shape}")
    return array


def _labels(file: Path, key: str, array: NDArray[Any]) -> NDArray[Any]:
    if not np.issubdtype(array.dtype, np.integer):
        raise UserError(f"{file}: {key} is {array.dtype}; expected integers")
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise UserError(f"{file}: {key} has shape {array.shape}; expected [n]")
    if array.min(initial=0) < 0:
        raise UserError(f"{file}: {key} contains {array.min()}; labels must be 0 or greater")
    return array.astype(np.int64)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
