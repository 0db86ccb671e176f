"""Sources: indexable sets of samples, with their settings and checks, and the sources of a run by split."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar
from urllib.parse import urlsplit

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.flags import SeparateTestFolder
from paceline.config.resolve import Config
from paceline.config.settings import HasSettings, RunSettings, is_never, setting
from paceline.contracts.data_spec import INPUT, LARGEST, LEFT_OUT, DataSpec
from paceline.core.errors import UserError, check_parameters
from paceline.core.registry import is_path, load_class
from paceline.data.file_lists import first_few, held_out
from paceline.data.stream import FULL, Shuffle, cut, ratio_of
from paceline.images.rectangles import Box

LABEL = "label"
LOW = "low"  # field with the low-resolution version of the image
TARGET = "target"  # default name of the second of two panels
RESERVED = (LABEL, "index", "uniforms")  # other fields of a batch
Sample = dict[str, NDArray[Any]]  # images are [height, width, channels] arrays, labels are int64 scalars


def stack(samples: Sequence[Sample]) -> Sample:
    """Return the fields of several samples, stacked."""
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


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
    decodes: bool = True
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

    def read_window(self, index: int, window: Box) -> Sample:
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
        numbers = []
        for index in indices:
            sample = self.files_of(int(index))
            if sample is None:
                return None
            numbers.append(sample.numbers)
        return stack(numbers)

    def name_of(self, index: int) -> str:
        """Return the name of a sample, for error messages."""
        return f"sample {index}"

    def read_many(self, indices: NDArray[np.int64]) -> Sample:
        """Read several samples of the same size and stack them.

        Override this if the source can read many samples at once.
        """
        return stack([self.read(int(index)) for index in indices])


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


def bytes_needed(source: Source) -> int:
    """Return the size of all decoded samples in bytes."""
    needed, count = 0, len(source)
    for name, field in source.read(0).items():
        if field.ndim == 3 and source.sizes is not None:
            pixels = int((source.sizes // ratio_of(name, source.spec.scale)).prod(axis=1).sum())
            needed += pixels * field.shape[-1] * field.itemsize
        else:
            needed += count * field.nbytes
    return needed


class Subset(Source):
    """A subset of another source's samples, in a given order."""

    def __init__(self, source: Source, indices: Sequence[int] | NDArray[np.int64]) -> None:
        self.source, self.indices, self.spec = source, np.asarray(indices), source.spec
        self.sizes = None if source.sizes is None else source.sizes[self.indices]
        self.shuffle, self.lookahead, self.decodes = source.shuffle, source.lookahead, source.decodes

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> Sample:
        return self.source.read(int(self.indices[index]))

    def read_many(self, indices: NDArray[np.int64]) -> Sample:
        return self.source.read_many(self.indices[indices])

    def read_window(self, index: int, window: Box) -> Sample:
        return self.source.read_window(int(self.indices[index]), window)

    def encoded(self, index: int) -> Encoded | None:
        return self.source.encoded(int(self.indices[index]))

    def files_of(self, index: int) -> Encoded | None:
        return self.source.files_of(int(self.indices[index]))

    def checksums_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64] | None:
        return self.source.checksums_of(self.indices[indices])

    def originals(self, index: int) -> Encoded | None:
        return self.source.originals(int(self.indices[index]))

    def prefetch(self, indices: NDArray[np.int64]) -> None:
        self.source.prefetch(self.indices[indices])

    def numbers_of(self, indices: NDArray[np.int64]) -> Sample | None:
        return self.source.numbers_of(self.indices[indices])

    def name_of(self, index: int) -> str:
        return self.source.name_of(int(self.indices[index]))


def split_off(source: Source, fraction: float, seed: int) -> tuple[Source, Source]:
    """Split a source at random; return the training samples and the `fraction` held out for validation."""
    if source.groups:
        validated = held_out(source.groups, fraction, seed)
    else:
        order = np.random.Generator(np.random.Philox(key=seed)).permutation(len(source))
        validated = np.isin(np.arange(len(source)), order[: round(len(source) * fraction)])
    return Subset(source, np.flatnonzero(~validated)), Subset(source, np.flatnonzero(validated))


def is_in_memory(source: Source) -> bool:
    """Return whether the samples are arrays in memory, which are fast to read."""
    while isinstance(source, Subset):
        source = source.source
    return isinstance(source, ArraySource)


@dataclass(frozen=True)
class PanelSettings(SeparateTestFolder):
    """Settings for sources whose files are rows of panels (aligned images)."""

    panels: str = setting(
        "",
        "comma-separated panel names, left to right: image is the input, segmentation is a mask, - skips a panel",
    )


def parse_panels(text: str) -> tuple[str, ...]:
    """Return the panel names from left to right; raise UserError if they are not valid."""
    if not text:
        return ()
    names = tuple(word.strip() for word in text.split(","))
    named = [name for name in names if name != LEFT_OUT]
    if named.count(INPUT) != 1 or len(named) < 2 or len(set(named)) < len(named):
        raise UserError(f"panels={text}: give each panel a unique name, and call the input {INPUT!r}")
    invalid = [name for name in named if not name.isidentifier()]
    if invalid:
        raise UserError(f"panels={text}: {invalid[0]!r} is not a valid name; use letters, digits and _")
    reserved = [name for name in named if name in RESERVED]
    if reserved:
        raise UserError(f"panels={text}: {reserved[0]!r} is the name of another field; choose a different name")
    return names


def check_split(source: Source, split: str, name: str) -> None:
    """Raise UserError if the first sample or the classes of a split are wrong; the message starts with `name`."""
    check_sample(source, f"{name}: sample 0 of split {split!r}")
    check_classes(source, f"{name}: split {split!r}")


def check_sample(source: Source, what: str) -> None:
    """Raise UserError if the first sample has a format that is not allowed; the message starts with `what`."""
    if not len(source):
        return
    sample, spec = source.read(0), source.spec
    if not isinstance(sample, dict):
        raise UserError(f"{what}: is of type {type(sample).__name__}: return a dict {{name: array}}")
    for name, value in sample.items():
        if not isinstance(value, (np.ndarray, np.generic)):
            raise UserError(f"{what}: {name!r} is of type {type(value).__name__}: return a NumPy array or number")
        array = np.asarray(value)
        found = f"{what}: {name!r} is a {array.dtype} array of shape {list(array.shape)}"
        is_image = array.ndim == 3 and array.dtype == spec.dtype
        if (array.ndim == 3 and not is_image) or (name == INPUT and not (is_image and array.shape[2] == spec.channels)):
            expected = f"a {spec.dtype} array of shape [height, width, {spec.channels}], as self.spec declares"
            raise UserError(f"{found}: return {expected}")
        if name == LABEL and (array.dtype != np.int64 or array.ndim):
            raise UserError(f"{found}: return a single int64 number")


def check_classes(source: Source, what: str) -> None:
    """Raise UserError if class names or labels do not match `spec.num_classes`; the message starts with `what`.

    If samples have to be decoded, only the first label is checked.
    """
    names, num_classes = source.spec.class_names, source.spec.num_classes
    if names and len(names) != num_classes:
        what = f"{what}: spec.num_classes is {num_classes}, but there are {len(names)} class names"
        raise UserError(f"{what}; use one name per class")
    if not num_classes or not len(source):
        return
    labels = None if source.decodes else known_labels(source)
    labels = np.atleast_1d(source.read(0).get(LABEL, np.int64(0))) if labels is None else labels
    wrong = labels[(labels < 0) | (labels >= num_classes)]
    if len(wrong):
        raise UserError(
            f"{what}: a label is {wrong[0]}, but spec.num_classes is {num_classes}; "
            f"labels must be from 0 to {num_classes - 1}"
        )


NumberOrTensor = TypeVar("NumberOrTensor", float, Tensor)


def selecting(number: NumberOrTensor, num_classes: int) -> NumberOrTensor:
    """Return the draws that select classes."""
    return (number + 0.5) / num_classes


def known_labels(source: Source) -> NDArray[np.int64] | None:
    """Return the labels of all samples; None if they are not known without reading the samples."""
    return (source.numbers_of(np.arange(len(source))) or {}).get(LABEL)


def count_classes(source: Source) -> Tensor:
    """Return the number of samples of each class, on the CPU; samples are read only if their labels are not known."""
    labels = known_labels(source)
    if labels is None:
        labels = np.array([source.read(index)[LABEL] for index in range(len(source))])
    return torch.from_numpy(np.bincount(labels.astype(np.int64), minlength=source.spec.num_classes))


def with_empty_classes(source: Source) -> DataSpec:
    """Return a source's data spec with its empty classes, if labels are known without reading the samples."""
    labels = known_labels(source)
    if labels is None:
        return source.spec
    empty = np.setdiff1d(np.arange(source.spec.num_classes), labels)
    return dataclasses.replace(source.spec, empty_classes=tuple(empty.tolist()))


def without_empty_classes(draws: Tensor, spec: DataSpec) -> Tensor:
    """Turn uniform draws into draws that select all classes with training images with the same probability."""
    if not spec.empty_classes:
        return draws
    counts = torch.ones(spec.num_classes, device=draws.device)
    counts[list(spec.empty_classes)] = 0
    return in_proportion(draws, counts)


def in_proportion(draws: Tensor, counts: Tensor) -> Tensor:
    """Turn uniform draws into draws that select each class as often as it occurs in `counts`, without empty classes.

    If all classes occur equally often, the draws still select the same classes.
    """
    ends = counts.cumsum(0)
    numbers = torch.searchsorted(ends[:-1].double(), draws.double() * ends[-1], right=True)
    return selecting(numbers, len(counts)).to(draws.dtype)


def open_sources(config: Config, split: str = "") -> dict[str, Source]:
    """Return the run's sources by split: train, test if the source has one, and validation if samples are held out.

    If `split` is given and is stored separately from the training samples, only that split is opened.
    """
    source_class = load_class("source", config.run.data, Source)
    settings, splits = settings_and_splits(config)
    if split != "train" and split in splits:
        return {split: _open(source_class, split, settings)}
    # A source without training samples raises an error.
    sources = {split: _open(source_class, split, settings) for split in dict.fromkeys(("train", *splits))}
    return sources | _hold_out(config.run, sources["train"])


def open_training_samples(config: Config) -> Source:
    """Return the samples that a run is trained on, without opening its test split."""
    source_class = load_class("source", config.run.data, Source)
    return _hold_out(config.run, _open(source_class, "train", settings_and_splits(config)[0]))["train"]


def _open(source_class: type[Source], split: str, settings: RunSettings) -> Source:
    """Open one split; raise UserError if the source's class does not follow the contract."""
    shown = f"--data {settings.data}"
    for name in ("__init__", "__len__", "read"):
        if getattr(source_class, name) is getattr(Source, name):
            raise UserError(f"{shown}: {source_class.__name__} has no method {name}; define it")
    check_parameters(f"{shown}: __init__(self, split, settings)", source_class, split, settings)
    source = source_class(split, settings)
    if not isinstance(getattr(source, "spec", None), DataSpec):
        raise UserError(f"{shown}: self.spec is not a DataSpec; set it in __init__")
    if source.spec.num_classes > LARGEST:
        most = f"at most {LARGEST:,} are supported"
        raise UserError(f"{shown}: has {source.spec.num_classes:,} classes, but {most}; number them without gaps")
    if not isinstance(length := source.__len__(), int | np.integer) or length < 0:
        raise UserError(f"{shown}: __len__ returns {length!r}; return the number of samples")
    if split == "train" and (empty := with_empty_classes(source).empty_classes):
        named = first_few([source.spec.classes[index] for index in empty])
        note = f"{shown}: {len(empty)} of {source.spec.num_classes} classes have no training images ({named})"
        source.notes = (*source.notes, note)
    return source


def check_evaluated(config: Config, sources: Mapping[str, Source]) -> None:
    """Raise UserError if a recipe is evaluated on held-out samples, but there are none."""
    recipe_class, run = config.recipe_class, config.run
    is_evaluated = recipe_class.evaluation.evaluator and not is_never(run.evaluate_every)
    if is_evaluated and recipe_class.evaluation.split != "train" and not sources.keys() & {"validation", "test"}:
        raise UserError(
            f"--data {run.data}: has no test split, and validation={run.validation:g} holds out no samples to evaluate "
            "the model; use --set validation=0.1, or --set evaluate_every=never"
        )


def settings_and_splits(config: Config) -> tuple[RunSettings, Sequence[str]]:
    """Return the settings of a run's sources, and the splits that the run uses.

    A recipe that is evaluated against its training images needs no held-out images. If the source would hold some out,
    the training split consists of all images, and there is no test split.
    """
    source_class = load_class("source", config.run.data, Source)
    if config.recipe_class.evaluation.split == "train":
        whole = source_class.measure_whole(config.run)
        if whole != config.run:
            return whole, ("train",)
    return config.run, source_class.splits_of(config.run)


def _hold_out(run: RunSettings, whole: Source) -> dict[str, Source]:
    """Return the training samples and, if samples are held out, the validation samples."""
    if not run.validation:
        return {"train": whole}
    train, validation = split_off(whole, run.validation, run.split_seed)
    train.notes, train.not_used, train.class_advice = whole.notes, whole.not_used, whole.class_advice
    if not len(train) or not len(validation):
        share = f"--set validation={math.ceil(1000 / max(1, len(whole))) / 1000:g} to hold out at least one sample, or "
        raise UserError(
            f"validation={run.validation:g}: leaves a split empty (samples available: {len(whole)}); "
            f"use {share if len(whole) > 1 else ''}--set validation=0 to hold out no samples"
        )
    return {"train": train, "validation": validation}


MAX_LENGTH = 80


def data_name(source: str, root: str) -> str:
    """Return the name of the data: of its source or, if the source reads any data, of the file or folder that it reads.

    For example, `cifar10` for the source `cifar10`, and for the source `npz` with the file `cifar10.npz`. A source in a
    user's own file is not loaded, because the name of a run's data must not require trust in its code.
    """
    name = clean_name(Path(source).stem)
    is_default = root in ("", RunSettings.data_root)
    if is_default or is_path(source) or not load_class("source", source, Source).reads_any_data:
        return name
    place = urlsplit(root).path if "://" in root else root  # host and query may contain credentials
    return clean_name(Path(place).name.removesuffix(".npz")) or name


def clean_name(text: str) -> str:
    """Return text that can be part of a metric's name."""
    return re.sub(r"[^\w.-]+", "-", text)[:MAX_LENGTH].strip("-")
