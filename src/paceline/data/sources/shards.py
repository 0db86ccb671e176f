"""Tar files in the WebDataset layout, in a local folder, on an HTTP server or on S3.

A sample consists of the files whose names are equal up to the first dot: `000123.jpg` with the class number in
`000123.cls`, or `000123.input.png` with `000123.target.png`. Remote tar files are read in parts, which are cached on
the local disk. Without shards for testing, a fixed fifth of the samples is held out, unless `test_root` is set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.config.flags import SeparateTestFolder
from paceline.config.settings import RunSettings, setting
from paceline.contracts.data_spec import INPUT, LEFT_OUT, output_panels
from paceline.core.errors import UserError
from paceline.core.files import user_cache, user_path
from paceline.core.storage.files import StoredFile
from paceline.core.storage.reader import BlockCache, Reader
from paceline.core.text import printable
from paceline.data.file_lists import first_few, group_keys, split_files
from paceline.data.image_files import Content, ImageSamples, SampleLayout
from paceline.data.shard_index import HEADER_BYTES
from paceline.data.shards import Catalog, SampleTable, load_indexes, make_table, open_catalog
from paceline.data.source import LABEL, LOW, TARGET, PanelSettings, Sample, parse_panels, stack
from paceline.data.stream import Shuffle

GIGABYTE = 10**9
MAX_HELD_BYTES = 2**26  # maximum size of the encoded images that `read_many` holds at once


class Shards(ImageSamples):
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
    def has_test_split(cls, settings: SeparateTestFolder) -> bool:
        return "test" in open_catalog(_root(settings), "--data-root").splits

    def __init__(self, split: str, settings: Settings) -> None:
        folder = user_path(settings.shard_cache) if settings.shard_cache else user_cache() / "shards"
        limit = int(settings.shard_cache_gb * GIGABYTE)
        catalog, shards, is_split = _find(split, settings)
        cache = BlockCache(folder, limit) if limit and not catalog.storage.is_local else None
        self.shown = catalog.storage.shown
        self.notes = catalog.notes
        self._reader = Reader(catalog.storage, shards, cache, min(settings.shard_wait, settings.timeout / 2))
        self._indexes = folder / "index"
        self._table = make_table(load_indexes(catalog, shards, self._reader, self._indexes, settings.workers))
        self.labels = self._table.labels
        images = {field: self._table.members[field] for field in self._table.images}
        self.stored_sizes = {field: np.stack([rows["height"], rows["width"]], axis=1) for field, rows in images.items()}
        ignored = first_few([f"{suffix:.24} ({count:,})" for suffix, count in self._table.ignored.most_common()])
        if ignored:
            self.notes += (f"{self.shown}: members that are not images or class numbers are not used: {ignored}",)
        self.may_skip = settings.bad_images == "skip"
        if not self._table.problems and not len(self):
            found = f"no images found{f' (members that are not used: {ignored})' if ignored else ''}"
            raise UserError(f"{self.shown}: {found}; expected members such as 000123.jpg and 000123.cls")
        self.leave_out({}, self._table.problems)
        if not is_split:
            paths = _paths(self._table) if settings.group_by else [Path()] * len(self)
            self.keep(split_files(settings.group_by, Path(), paths, split, self.shown))
        self.choose_reader((self._contents([row], [INPUT])[0][INPUT] for row in range(len(self))), settings)
        if self.may_skip:
            self.leave_out(self.measure_images(self.decoded_size, settings))
        self.layout = self._choose_layout(settings)
        must_fit_crop = self.may_skip and split == "train" and not self.layout.side
        self.leave_out(self.check_sizes(settings.crop if must_fit_crop else 0))
        class_names = catalog.class_names if self.labels is not None else ()
        self.spec = self.make_spec(
            settings, self._count_classes(class_names), class_names, may_flip=catalog.flip_allowed
        )
        self.groups = group_keys(settings.group_by, Path(), _paths(self._table)) if settings.group_by else ()
        self.shuffle = Shuffle(settings.shuffle_block, settings.shuffle_mixed)

    def __len__(self) -> int:
        return len(self._table)

    def contents(self, indices: Sequence[int]) -> list[Mapping[str, Content]]:
        return [*self._contents(indices, self._table.images)]

    def place_of(self, index: int, field: str) -> str:
        return f"{self.shown}: {printable(self.name_of(index))}"

    def image_name(self, index: int, field: str) -> str:
        name = f"{self.name_of(index):.200}"
        return name if len(self.stored_sizes) == 1 else f"{name}.{field}"

    def keep(self, rows: NDArray[np.int64]) -> None:
        super().keep(rows)
        self._table = self._table.rows(rows)

    def read(self, index: int) -> Sample:
        return self.decode(index, self._contents([index], self.layout.fields)[0])

    def read_many(self, indices: NDArray[np.int64]) -> Sample:
        samples: list[Sample] = []
        for part in self._groups(indices.tolist()):
            samples += map(self.decode, part, self._contents(part, self.layout.fields))
        return stack(samples)

    def prefetch(self, indices: NDArray[np.int64]) -> None:
        fields = self._checked_fields(self.layout.fields)
        self._reader.prefetch([self._table.span(field, index) for index in indices for field in fields])

    def checksums_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        checksums = [self._table.members[field]["crc32"][indices] for field in self._table.images]
        return np.stack(checksums, axis=1).astype(np.int64)

    def name_of(self, index: int) -> str:
        return self._table.names[index]

    def _groups(self, indices: Sequence[int]) -> Iterator[list[int]]:
        """Split a list of samples so that the encoded images of each part fit in the memory limit."""
        group: list[int] = []
        held = 0
        for index in indices:
            size = sum(int(self._table.members[field]["size"][index]) for field in self._table.images)
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
                    f"{self.place_of(index, field)}: does not match its checksum, so the shard was changed or damaged "
                    "after it was indexed; restore the shard, or delete its index (beside the shard, or in "
                    f"{self._indexes})"
                )
        return content[HEADER_BYTES:]

    def _choose_layout(self, settings: Settings) -> SampleLayout:
        names, stored = parse_panels(settings.panels), list(self.stored_sizes)
        fields, row = stored, names if stored == [INPUT] else ()
        if names and not row:
            fields = [name for name in names if name != LEFT_OUT]
            unknown = [name for name in fields if name not in stored]
            if unknown:
                raise UserError(
                    f"panels={settings.panels}: no panel {unknown[0]!r}; the shards have {', '.join(stored)}"
                )
        if LOW in fields and settings.size:
            raise UserError(f"size={settings.size}: not supported with low-resolution images; use --set size=0")
        has_panels = bool(names) or not {INPUT, TARGET, LOW}.issuperset(fields)
        are_squares = not row and fields == [INPUT] and (self.labels is not None or not settings.crop)
        return SampleLayout(
            tuple(fields),
            row,
            output_panels(row or fields) if has_panels else (),
            settings.size or (int(self.stored_sizes[INPUT][0].min()) if are_squares else 0),
            self.find_scale() if LOW in fields else 0,
        )

    def _count_classes(self, class_names: Sequence[str]) -> int:
        if self.labels is None:
            return 0
        num_classes, largest = len(class_names) or int(self.labels.max()) + 1, int(self.labels.argmax())
        if self.labels[largest] >= num_classes:
            raise UserError(
                f"{self.place_of(largest, LABEL)}: class number {self.labels[largest]}, but there are only "
                f"{num_classes} class names; correct the list of class names"
            )
        return num_classes


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


def _paths(table: SampleTable) -> list[Path]:
    return [Path(table.names[row]) for row in range(len(table))]
