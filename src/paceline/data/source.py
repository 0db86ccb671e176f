"""The base class for sources: indexable sets of samples, read without augmentation.

A source contains no code for batches or devices. It is one file, in `sources/` or written by the user. Its class takes
the split and the settings of the run, and can declare additional settings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.config.settings import HasSettings, RunSettings
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.data.crop import Window, cut
from paceline.data.tickets import FULL, Shuffle

Sample = dict[str, NDArray[Any]]  # images are [height, width, channels] arrays, labels are int64 scalars


class Encoded(NamedTuple):
    """A sample whose images have not been decoded."""

    files: dict[str, Path]  # image files by field
    numbers: Sample  # labels and other fields that are not images


class Source(HasSettings):
    """An indexable set of samples. Subclass it in a separate file.

    The file name is the name of the source. Implement `__len__`, `read`, and an `__init__` that sets `spec`. Images are
    [height, width, channels] arrays of `spec.dtype` (by default uint8), and labels are int64. Do not shuffle, crop or
    flip samples: the run does that. To declare additional settings, define a frozen dataclass `Settings` that extends
    `RunSettings`.

    Examples:
        ```python
        # my_source.py
        from pathlib import Path

        import numpy as np
        from PIL import Image

        from paceline import DataSpec, Source


        class MySource(Source):
            def __init__(self, split, settings):
                names = ("bar", "cross")  # folders with images of 32×32 pixels; the last five of each are for tests
                rows = slice(0, 15) if split == "train" else slice(15, 20)
                folders = [sorted(Path(settings.data_root, name).glob("*.png"))[rows] for name in names]
                self.samples = [(file, label) for label, files in enumerate(folders) for file in files]
                self.spec = DataSpec(channels=1, height=32, width=32, num_classes=2, class_names=names)

            def __len__(self):
                return len(self.samples)

            def read(self, index):
                file, label = self.samples[index]
                image = np.asarray(Image.open(file).convert("L"))
                return {"image": image[..., None], "label": np.int64(label)}
        ```

        >>> folder = "docs/examples/shapes"
        >>> result = paceline.train("./my_recipe.py", data="./my_source.py", data_root=folder, images=256)
        >>> paceline.load(result.folder).classes
        ('bar', 'cross')
    """

    splits: ClassVar[tuple[str, ...]] = ("train", "test")
    """The available splits, unless `splits_of` is overridden."""
    decodes: ClassVar[bool] = True
    """Whether reading a sample is much slower than copying it, for example because it must be decoded."""
    reads_any_data: ClassVar[bool] = False
    """Whether `data_root` chooses the data set, as for `folder`. If so, its name is used in the names of metrics."""
    lookahead: int = 0
    """How many batches ahead `prefetch` is called; 0 if the source does not prefetch."""
    shuffle: Shuffle = FULL
    """How training shuffles the samples; by default, all of them together."""
    spec: DataSpec
    """The properties of the samples. Set this attribute in `__init__`."""
    sizes: NDArray[np.int64] | None = None
    """The height and width of each "image" as an [n, 2] array; None if all have the size in `spec`."""
    groups: tuple[str, ...] = ()
    """The group of each sample, if any. A group is never split between training and validation."""
    notes: tuple[str, ...] = ()
    """Notes for commands to print, for example how many files were skipped."""
    not_used: tuple[str, ...] = ()
    """All unused files, each with the reason. If there are many, commands write the list to a file."""
    class_advice: str = ""
    """What to do to get classes, for samples with fewer than two, if a recipe needs them."""

    def __init__(self, split: str, settings: RunSettings) -> None:
        """Open one split, "train" or "test", of the files in `settings.data_root`."""
        raise NotImplementedError

    def __repr__(self) -> str:
        spec = self.spec
        classes = f", {spec.num_classes:,} class{'es' * (spec.num_classes > 1)}" if spec.num_classes else ""
        return f"{type(self).__name__}({len(self):,} samples, {spec.channels}×{spec.height}×{spec.width}{classes})"

    @classmethod
    def splits_of(cls, settings: RunSettings) -> tuple[str, ...]:
        """Return the splits available with these settings; by default, `splits`.

        Override this if the splits depend on the data.
        """
        return cls.splits

    @classmethod
    def measure_whole(cls, settings: RunSettings) -> RunSettings:
        """Return settings that use an entire folder instead of one split.

        Used by `paceline evaluate --data-root`, and for recipes that need no test split. By default, the settings are
        unchanged. A source that holds out part of a folder for testing overrides this, so that the whole folder is used
        as both splits.
        """
        return settings

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, index: int) -> Sample:
        """Read and decode one sample."""
        raise NotImplementedError

    def read_window(self, index: int, window: Window) -> Sample:
        """Read one sample, cropped to a window.

        Override this if the source can read part of a sample faster than the whole sample.
        """
        return cut(self.read(index), window, self.spec.scale)

    def encoded(self, index: int) -> Encoded | None:
        """Return a sample's files if decoding them gives the same result as `read`.

        Otherwise, return None. Two differences are allowed: `read` may convert images to RGB, and may crop them at the
        right and bottom edges.
        """
        return None

    def files_of(self, index: int) -> Encoded | None:
        """Return the files that `read` opens for a sample, and its labels.

        Return None if this requires reading the sample.
        """
        return None

    def checksums_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return the checksums that are stored with the samples.

        The result has one row per sample. Return None if no checksums are stored.
        """
        return None

    def originals(self, index: int) -> Encoded | None:
        """Return the files that `paceline pack --to-shards` copies into tar files.

        Return None if `read` changes the images, for example by adding noise. They are then stored as PNG files.
        """
        return self.encoded(index)

    def prefetch(self, indices: NDArray[np.int64]) -> None:
        """Start to load samples that will be read soon; return without waiting."""

    def numbers_of(self, indices: NDArray[np.int64]) -> Sample | None:
        """Return the labels and other numbers for several samples, stacked.

        Return None if this requires reading the samples.
        """
        found = []
        for index in indices:
            sample = self.files_of(int(index))
            if sample is None:
                return None
            found.append(sample.numbers)
        return {name: np.stack([numbers[name] for numbers in found]) for name in found[0]}

    def name_of(self, index: int) -> str:
        """Return the name of a sample, for error messages."""
        return f"sample {index}"

    def read_many(self, indices: NDArray[np.int64]) -> Sample:
        """Read several samples of the same size and stack them.

        Override this if the source can read many samples at once.
        """
        samples = [self.read(int(index)) for index in indices]
        return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


class ArraySource(Source):
    """A source whose samples are in memory, in arrays with one row per sample.

    Subclass it in a separate file, with an `__init__(self, split, settings)`.

    Examples:
        ```python
        # stripes.py
        import numpy as np

        from paceline import ArraySource, DataSpec


        class Stripes(ArraySource):
            def __init__(self, split, settings):
                labels = np.arange(64) % 2
                images = np.zeros((64, 8, 8, 1), np.uint8)
                images[labels == 0, ::2] = 255
                images[labels == 1, :, ::2] = 255
                super().__init__({"image": images, "label": labels}, DataSpec(1, 8, 8, num_classes=2))
        ```

        >>> result = paceline.train("./my_recipe.py", data="./stripes.py", images=2_048)
        >>> result.metrics["test/top1"]
        100.0
    """

    decodes = False

    def __init__(self, arrays: Sample, spec: DataSpec) -> None:
        """Store the arrays by field: "image" is [n, h, w, c] of type `spec.dtype`, "label" is int64 [n]."""
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name!r} has {length:,}" for name, length in lengths.items())
            raise UserError(f"{type(self).__name__}: the arrays differ in length ({listed}); use one row per sample")
        self.arrays, self.spec = arrays, spec

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def read(self, index: int) -> Sample:
        return {name: array[index] for name, array in self.arrays.items()}

    def numbers_of(self, indices: NDArray[np.int64]) -> Sample | None:
        return {name: array[indices] for name, array in self.arrays.items() if array.ndim == 1}

    def read_many(self, indices: NDArray[np.int64]) -> Sample:
        return {name: array[indices] for name, array in self.arrays.items()}


def sizes_of(source: Source) -> NDArray[np.int64]:
    """Return the height and width of each sample's "image", as an [n, 2] array."""
    if source.sizes is not None:
        return source.sizes
    return np.full((len(source), 2), (source.spec.height, source.spec.width), dtype=np.int64)


def has_one_size(source: Source) -> bool:
    """Return whether all samples have the same size, so that whole samples can share a batch."""
    return source.sizes is None or bool((source.sizes == source.sizes[0]).all())
