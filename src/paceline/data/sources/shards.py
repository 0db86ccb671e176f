"""Tar files in the WebDataset layout, in a local folder, on an HTTP server or on S3.

A sample consists of the files whose names are equal up to the first dot: `000123.jpg` with the class number in
`000123.cls`, or `000123.input.png` with `000123.target.png`. Remote tar files are read in parts, which are cached on
the local disk. Without shards for testing, a fixed fifth of the samples is held out, unless `test_root` is set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.config.settings import RunSettings, setting
from paceline.contracts.data_spec import INPUT, DataSpec
from paceline.core.errors import UserError
from paceline.core.files import user_cache, user_path
from paceline.core.storage.files import StoredFile
from paceline.core.storage.reader import BlockCache, Reader
from paceline.core.terminal import counted
from paceline.core.text import printable
from paceline.data.file_lists import SIZES_DIFFER, Problem, describe_problems, first_messages, listed_elsewhere
from paceline.data.shards.catalog import Catalog, describe_detection, load_indexes, open_catalog
from paceline.data.shards.index import HEADER_BYTES
from paceline.data.shards.samples import LABEL, SampleLayout, SampleTable, make_table
from paceline.data.source import PanelSettings, Sample, Source, group_keys, parse_panels, split_files
from paceline.data.stream import Shuffle
from paceline.data.whole_source import num_readers
from paceline.images.decode import BadImage
from paceline.images.readers import choose_reader

GIGABYTE = 10**9
MAX_SUFFIXES = 8  # maximum number of suffixes in a note
MAX_HELD_BYTES = 2**26  # maximum size of the encoded images that `read_many` holds at once


class Shards(Source):
    """Samples in tar files. Labelled images become squares, as in `folder`; others keep their size if `crop` is set."""

    lookahead = 4
    reads_any_data = True

    @dataclass(frozen=True)
    class Settings(PanelSettings):
        """The cache for remote shards, and the order of the samples."""

        shard_cache: str = setting(
            "", "cache folder for remote shards (default: ~/.cache/paceline/shards)", mutable_on_resume=True
        )
        shard_cache_gb: float = setting(
            50.0, "maximum size of the cache in GB; 0 disables it", at_least=0, mutable_on_resume=True
        )
        shard_wait: float = setting(
            300.0,
            "seconds to wait for a server that does not answer (at most half of --timeout)",
            at_least=0,
            mutable_on_resume=True,
        )
        shuffle_block: int = setting(
            0, "shuffle blocks of this many consecutive samples; 0 shuffles all samples together", at_least=0
        )
        shuffle_mixed: int = setting(16, "number of blocks whose samples are shuffled together", at_least=1)

    @classmethod
    def measure_whole(cls, settings: RunSettings) -> RunSettings:
        assert isinstance(settings, cls.Settings)
        if settings.test_root or "test" in open_catalog(_root(settings), "--data-root").splits:
            return settings
        return dataclasses.replace(settings, test_root=settings.data_root, validation=0.0)

    def __init__(self, split: str, settings: Settings) -> None:
        folder = user_path(settings.shard_cache) if settings.shard_cache else user_cache() / "shards"
        limit = int(settings.shard_cache_gb * GIGABYTE)
        catalog, shards, is_split = _find(split, settings)
        cache = BlockCache(folder, limit) if limit and not catalog.storage.is_local else None
        self._shown = catalog.storage.shown
        self.notes = catalog.notes + describe_detection(catalog.storage, shards)
        self._reader = Reader(catalog.storage, shards, cache, min(settings.shard_wait, settings.timeout / 2))
        self._may_skip = settings.bad_images == "skip"
        self._indexes = folder / "index"
        table = make_table(load_indexes(catalog, shards, self._reader, self._indexes, settings.workers))
        ignored = _describe_ignored(table.ignored)
        if ignored:
            self.notes += (f"{self._shown}: members that are not images or class numbers are not used: {ignored}",)
        self._report(table.problems, len(table), ignored)
        self._table = table if is_split else _held_out(table, split, settings, self._shown)
        chosen = choose_reader((self._contents([row], [INPUT])[0][INPUT] for row in range(len(self._table))), settings)
        self._image_reader, self.notes = chosen.reader, self.notes + chosen.notes
        if self._may_skip:
            self._leave_out(self._undecodable(num_readers(settings)), "unreadable image")
        self._layout = SampleLayout.of(self._table, settings, parse_panels(settings.panels))
        self._leave_out(self._layout.problems(self._table), SIZES_DIFFER)
        if self._may_skip and split == "train" and not self._layout.side:
            self._leave_out(self._smaller_than(settings.crop), "smaller than the crop")
        self.spec = self._make_spec(settings, catalog)
        self.groups = group_keys(settings.group_by, Path(), _paths(self._table)) if settings.group_by else ()
        self.shuffle = Shuffle(settings.shuffle_block, settings.shuffle_mixed)

    def __len__(self) -> int:
        return len(self._table)

    def read(self, index: int) -> Sample:
        return self._sample(index, self._contents([index], self._layout.fields)[0])

    def read_many(self, indices: NDArray[np.int64]) -> Sample:
        samples = [
            self._sample(index, contents)
            for group in self._groups(indices.tolist())
            for index, contents in zip(group, self._contents(group, self._layout.fields), strict=True)
        ]
        return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}

    def prefetch(self, indices: NDArray[np.int64]) -> None:
        fields = self._checked_fields(self._layout.fields)
        self._reader.prefetch([self._table.span(field, index) for index in indices for field in fields])

    def numbers_of(self, indices: NDArray[np.int64]) -> Sample | None:
        return {} if self._table.labels is None else {LABEL: self._table.labels[indices]}

    def checksums_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.stack([placed.crc32[indices] for placed in self._table.images.values()], axis=1).astype(np.int64)

    def name_of(self, index: int) -> str:
        return self._table.names[index]

    def _groups(self, indices: Sequence[int]) -> Iterator[list[int]]:
        """Split a list of samples so that the encoded images of each part fit in the memory limit."""
        group: list[int] = []
        held = 0
        for index in indices:
            size = sum(int(placed.size[index]) for placed in self._table.images.values())
            if group and held + size > MAX_HELD_BYTES:
                yield group
                group, held = [], 0
            group.append(index)
            held += size
        if group:
            yield group

    def _contents(self, indices: Sequence[int], fields: Sequence[str]) -> list[dict[str, bytes]]:
        """Return the encoded images of samples, after comparing them with their checksums."""
        checked = self._checked_fields(fields)
        read = iter(self._reader.read([self._table.span(field, index) for index in indices for field in checked]))
        samples = [{field: self._checked(field, index, next(read)) for field in checked} for index in indices]
        return [{field: sample[field] for field in fields} for sample in samples]

    def _checked_fields(self, fields: Sequence[str]) -> Sequence[str]:
        """Return fields and, if there are labels, the label: it is read to detect that a shard was replaced."""
        return fields if self._table.labels is None else (*fields, LABEL)

    def _checked(self, field: str, index: int, content: bytes) -> bytes:
        if not self._table.matches(field, index, content):
            span = self._table.span(field, index)
            self._reader.forget(span)  # the cached copy may be damaged
            (content,) = self._reader.read([span])
            if not self._table.matches(field, index, content):
                raise UserError(
                    f"{self._name(index)}: does not match its checksum, so the shard was changed or damaged after it "
                    f"was indexed; restore the shard, or delete its index (beside the shard, or in {self._indexes})"
                )
        return content[HEADER_BYTES:]

    def _sample(self, index: int, contents: Mapping[str, bytes]) -> Sample:
        images = {}
        for field, content in contents.items():
            try:
                images[field] = image = self._image_reader.decode(content)
            except BadImage as error:
                raise UserError(
                    f"{self._name(index)}: unreadable image ({error}); use --bad-images skip to leave out such samples"
                ) from error
            height, width = self._table.images[field].pixels[index]
            if (image.height, image.width) != (height, width):
                raise UserError(
                    f"{self._name(index)}: the {field} is {image.width}×{image.height} pixels, "
                    f"but its header specifies {width}×{height}; use --bad-images skip to leave out such samples"
                )
        labels = self._table.labels
        label = None if labels is None else np.asarray(labels[index])
        return self._layout.arrange(images, label, self._image_reader)

    def _name(self, index: int) -> str:
        return f"{self._shown}: {printable(self.name_of(index))}"

    def _make_spec(self, settings: Settings, catalog: Catalog) -> DataSpec:
        """Return the data spec. If images keep their sizes, also set `sizes`."""
        layout, labels = self._layout, self._table.labels
        height = width = layout.side
        if not layout.side:
            self.sizes = layout.image_sizes(self._table)
            height, width = (settings.crop, settings.crop) if settings.crop else self.sizes[0].tolist()
        class_names = catalog.class_names if labels is not None else ()
        num_classes = 0 if labels is None else len(class_names) or int(labels.max()) + 1
        if labels is not None and labels.max() >= num_classes:
            raise UserError(
                f"{self._name(int(labels.argmax()))}: class number {labels.max()}, but there are only {num_classes} "
                "class names; correct the list of class names"
            )
        pixels = self._image_reader.pixel_format
        return DataSpec(
            *(self._image_reader.channels, height, width, num_classes, class_names, catalog.flip_allowed),
            scale=layout.scale,
            panels=layout.panels,
            dtype=pixels.dtype,
            value_range=pixels.declared_range,
        )

    def _undecodable(self, num_threads: int) -> dict[int, str]:
        """Decode every image; return the problems by row. Also store the decoded sizes, which headers can get wrong."""
        problems: dict[int, str] = {}
        rows, fields = list(range(len(self._table))), list(self._table.images)

        def check(index: int, contents: Mapping[str, bytes]) -> None:
            try:
                for field, content in contents.items():
                    image = self._image_reader.decode(content)
                    self._table.images[field].pixels[index] = (image.height, image.width)
            except BadImage as error:
                problems[index] = f"unreadable image ({error})"

        with ThreadPoolExecutor(max(1, num_threads)) as threads:  # Pillow releases the GIL while it decodes
            for group in counted(self._groups(rows), f"decoding the images in all shards ({self._shown})", len(rows)):
                list(threads.map(check, group, self._contents(group, fields)))
        return problems

    def _smaller_than(self, crop: int) -> dict[int, str]:
        sizes = self._layout.image_sizes(self._table)
        small = np.flatnonzero((sizes < crop).any(axis=1))
        return {int(row): f"{sizes[row][1]}×{sizes[row][0]} pixels, smaller than the crop" for row in small}

    def _leave_out(self, problems: Mapping[int, str], kind: str) -> None:
        """Remove samples from the table; raise UserError unless bad images are skipped."""
        if problems:
            total = len(self._table)
            named = [Problem.of(printable(self.name_of(row)), one, kind) for row, one in sorted(problems.items())]
            self._report(named, total - len(problems))
            self._table = self._table.rows(np.array([row for row in range(total) if row not in problems]))

    def _report(self, problems: Sequence[Problem], num_left: int, ignored: str = "") -> None:
        """Add notes about samples that cannot be used; raise UserError unless bad images are skipped."""
        if problems and not self._may_skip:
            advice = f"use --bad-images skip to leave these out{listed_elsewhere(problems)}"
            raise UserError(f"{self._shown}: {first_messages(problems)}; {advice}")
        if not num_left:
            found = f"no images found{f' (members that are not used: {ignored})' if ignored else ''}"
            reason = f"no sample can be used: {first_messages(problems)}" if problems else found
            raise UserError(f"{self._shown}: {reason}; expected members such as 000123.jpg and 000123.cls")
        if problems:
            self.not_used += tuple(f"{self._shown}/{problem.message}" for problem in problems)
            self.notes += (f"left out {len(problems)} unusable items in {self._shown}: {describe_problems(problems)}",)


def _root(settings: RunSettings) -> str:
    if settings.data_root == RunSettings.data_root and not Path(settings.data_root).exists():
        raise UserError(f"--data {settings.data}: needs --data-root; pass the folder or URL of your shards")
    return settings.data_root


def _find(split: str, settings: Shards.Settings) -> tuple[Catalog, tuple[StoredFile, ...], bool]:
    """Return where a split's shards are, the shards, and whether they contain only this split."""
    if split == "test" and settings.test_root:
        catalog = open_catalog(settings.test_root, "--test-root")
        return catalog, tuple(file for files in catalog.splits.values() for file in files), True
    catalog = open_catalog(_root(settings), "--data-root")
    if split in catalog.splits:
        return catalog, catalog.splits[split], True
    if "" not in catalog.splits:
        remedy = "set --test-root" if split == "test" else f"put {split!r} in the names of its shards or folders"
        raise UserError(f"{catalog.storage.shown}: has no shards for the split {split!r}; {remedy}")
    return catalog, catalog.splits[""], bool(settings.test_root)


def _describe_ignored(ignored: Mapping[str, int]) -> str:
    """Return the most frequent suffixes, with the number of members."""
    common = sorted(ignored.items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{printable(suffix):.24} ({count:,})" for suffix, count in common[:MAX_SUFFIXES])
    return f"{shown}, …" if len(common) > MAX_SUFFIXES else shown


def _paths(table: SampleTable) -> list[Path]:
    return [Path(table.names[row]) for row in range(len(table))]


def _held_out(table: SampleTable, split: str, settings: Shards.Settings, shown: str) -> SampleTable:
    """Return a fixed fifth of the samples for testing, or the other samples for training."""
    if len(table) < 2:
        raise UserError(f"{shown}: one sample is too few to train and test on; add more, or set --test-root")
    paths = _paths(table) if settings.group_by else [Path()] * len(table)
    return table.rows(split_files(settings.group_by, Path(), paths, split))
