"""Your own arrays: one .npz file with x_train and, optionally, x_test and the labels y_train and y_test."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from paceline.config.flags import PixelSettings
from paceline.config.settings import RunSettings
from paceline.contracts.data_spec import LARGEST, MAX_CHANNELS, PixelFormat
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.core.files import why
from paceline.data.file_lists import first_few, named_root
from paceline.data.source import ArraySource
from paceline.images.decode import BadImage, arrange_images
from paceline.images.deep import GREY_AND_RGB, DeepImage, to_format
from paceline.images.readers import make_format, read_pixel_settings

DTYPES = ("uint8", "uint16", "float16", "float32", "float64")
UNREADABLE = (OSError, ValueError, EOFError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error)
LARGEST_RGBA = 4  # maximum number of channels of ordinary images


class Npz(ArraySource):
    """Images [n, h, w] or [n, h, w, channels] (uint8, uint16 or floats) and, optionally, integer labels [n].

    `--data-root` is the path to the file. Without x_test, there is no test split.
    """

    Settings = PixelSettings
    reads_any_data = True

    def __init__(self, split: str, settings: PixelSettings) -> None:
        file, key = _find(named_root(settings)), f"x_{split}"
        names = [f"y_{name}" for name in self.splits_of(settings)]  # the classes are those of all splits
        with _open(file) as archive:
            is_labelled = any(name in archive for name in names)
            arrays = _read(file, archive, [key, *(names if is_labelled else ())])
        images, pixels = _arranged(_images(file, key, arrays[key]), settings, f"{file}: {key}")
        fields, num_classes = {"image": images}, 0
        if is_labelled:
            labels = {name: _labels(file, name, arrays[name]) for name in names}
            num_classes = max(1 + int(array.max(initial=0)) for array in labels.values())
            fields["label"] = labels[f"y_{split}"]
            if len(images) != len(fields["label"]):
                raise UserError(f"{file}: {key} has {len(images)} rows but y_{split} has {len(fields['label'])}")
        else:
            self.notes = (f"{file}: has no {' or '.join(names)}, so the images have no labels",)
        _, height, width, channels = images.shape
        spec = DataSpec(channels, height, width, num_classes, dtype=pixels.dtype, value_range=pixels.declared_range)
        super().__init__(fields, spec)

    @classmethod
    def splits_of(cls, settings: RunSettings) -> tuple[str, ...]:
        with _open(_find(named_root(settings))) as archive:
            return ("train", "test") if {"x_test", "y_test"} & {*archive.files} else ("train",)


def _find(root: Path) -> Path:
    if root.is_file():
        return root
    files = sorted(file for file in root.glob("*.npz") if file.is_file())
    if len(files) == 1:
        return files[0]
    found = f"has {len(files)} .npz files" if root.is_dir() else "no such file"
    raise UserError(f"--data-root {root}: {found}; expected the path to a single .npz file")


def _open(file: Path) -> NpzFile:
    """Open an archive without reading its arrays."""
    try:
        with file.open("rb") as stream:
            is_archive = zipfile.is_zipfile(stream)
        # For other files, the error message of np.load would recommend allowing pickled objects.
        if not is_archive:
            raise UserError(
                f"{file}: not a readable .npz file (not an archive, or truncated); write it with "
                "np.savez(FILE, x_train=images, y_train=labels)"
            )
        archive = np.load(file, allow_pickle=False)
        assert isinstance(archive, NpzFile)
    except UNREADABLE as error:
        raise UserError(f"{file}: not a readable .npz file ({why(error)})") from error
    return archive


def _read(file: Path, archive: NpzFile, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return arrays by name; raise UserError if one is missing or damaged."""
    arrays = {}
    for name in names:
        if name not in archive:
            raise UserError(
                f"{file}: has no {name} (found: {first_few(archive.files) or 'no arrays'}); expected x_train, "
                "y_train for labels, and x_test and y_test for a test split"
            )
        try:
            arrays[name] = archive[name]
        except (*UNREADABLE, MemoryError) as error:  # the header of a damaged array can have any shape
            raise UserError(f"{file}: {name} cannot be read ({why(error)})") from error
        if not isinstance(arrays[name], np.ndarray):  # NumPy returns the bytes of other members
            raise UserError(f"{file}: {name} cannot be read (not an array); write it with np.savez")
    return arrays


def _images(file: Path, key: str, array: NDArray[Any]) -> NDArray[Any]:
    found = f"{file}: {key} is {array.dtype} of shape {list(array.shape)}"
    if array.ndim == 3:
        array = array[..., np.newaxis]
    channels_first = array.ndim == 4 and array.shape[1] <= LARGEST_RGBA < min(array.shape[2:])
    fits = array.dtype.name in DTYPES and array.ndim == 4 and array.size and array.shape[-1] <= MAX_CHANNELS
    if channels_first or not fits:
        raise UserError(
            f"{found}; expected images [n, h, w] or [n, h, w, channels] with at most {MAX_CHANNELS} channels, as uint8 "
            "(0 is black, 255 is white), uint16, or floats with a value_range"
            + (f": use {key}.transpose(0, 2, 3, 1)" if channels_first else "")
        )
    return array


def _arranged(array: NDArray[Any], settings: PixelSettings, name: str) -> tuple[NDArray[Any], PixelFormat]:
    """Return images with the size, channels and pixel format in the settings, and the pixel format."""
    kind, limits = read_pixel_settings(settings)
    own = array.dtype.name if array.dtype.kind == "u" else "float32"
    pixels = make_format(own if kind == "auto" else kind, limits, name, (float(array.min()), float(array.max())))
    channels, own_channels = settings.channels or array.shape[-1], array.shape[-1]
    if (own, pixels.dtype) == ("uint8", "uint8") and {channels, own_channels} <= GREY_AND_RGB:
        return arrange_images(array, settings), pixels
    if channels != own_channels and {channels, own_channels} != GREY_AND_RGB:
        raise UserError(f"channels={channels}: {name} has {own_channels}; use --set channels=0")
    try:
        images = DeepImage.each(to_format(array, pixels), channels, settings.size, pixels)
    except BadImage as error:
        raise UserError(f"{name}: {error}") from None
    return images, pixels


def _labels(file: Path, key: str, array: NDArray[Any]) -> NDArray[Any]:
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    is_integer = np.issubdtype(array.dtype, np.integer)
    span = (array.min(initial=0), array.max(initial=0)) if is_integer else (0, 0)
    if not is_integer or array.ndim != 1 or span[0] < 0 or span[1] >= LARGEST:
        values = f", with values from {span[0]} to {span[1]}" if is_integer else ""
        raise UserError(
            f"{file}: {key} is {array.dtype} of shape {list(array.shape)}{values}; expected integers [n] from 0 to "
            f"{LARGEST - 1:,}: use np.unique(labels, return_inverse=True)[1] for the labels of all splits or, for "
            f"one-hot labels, {key}.argmax(1)"
        )
    return array.astype(np.int64)
