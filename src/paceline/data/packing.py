"""A packed folder: every picture decoded once, its pixels one after another in a file for each field.

`pack.json` says what the folder holds and is written last. Beside it each split has a folder with `FIELD.pixels`
(uint8), `index.npy` (a row per sample: where each picture lies, its size and checksum, then the numbers) and
`names.json`. While it is being made, `packing.json` says of what, and `index.partial` grows by whole samples.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from zlib import crc32

import numpy as np
import torch

from paceline.data.loaders._pixels import bytes_needed
from paceline.data.loaders._transfer import channels_last
from paceline.data.loaders.workers import Workers
from paceline.data.source import Source, decodes, fingerprint, has_one_size
from paceline.data.tickets import in_order
from paceline.errors import UserError
from paceline.settings import RunSettings

FORMAT, VERSION = "paceline pack", 1
MANIFEST, UNFINISHED = "pack.json", "packing.json"
PLACE = ("offset", "height", "width", "checksum")  # the index's columns for each field of pictures
BYTES_PER_READ = 8 * 2**20
LOOKED_AT = 16  # samples that tell one source from another


class Layout(NamedTuple):
    """What a sample consists of."""

    pictures: dict[str, int]  # channels by field
    numbers: tuple[str, ...]

    @classmethod
    def of(cls, source: Source) -> Layout:
        """The layout of a source's samples."""
        sample = source.read(0)
        pictures = {name: int(field.shape[-1]) for name, field in sample.items() if field.ndim == 3}
        return cls(pictures, tuple(name for name in sample if name not in pictures))

    @property
    def columns(self) -> list[str]:
        """The columns of the index."""
        return [f"{name}.{what}" for name in self.pictures for what in PLACE] + list(self.numbers)


def describe(source: Source) -> dict[str, Any]:
    """What tells a split from another before it is packed."""
    layout = Layout.of(source)
    return {
        "count": len(source),
        "facts": dataclasses.asdict(source.facts),
        "mixed": source.sizes is not None,
        "pictures": layout.pictures,
        "numbers": list(layout.numbers),
        "fingerprint": fingerprint(source, LOOKED_AT),
    }


def begin(folder: Path, splits: Mapping[str, Any], made_from: Mapping[str, Any]) -> bool:
    """Makes the folder ready to be filled; true where a part of the same is there already."""
    wanted = {"format": FORMAT, "version": VERSION, "made_from": dict(made_from), "splits": dict(splits)}
    file = folder / UNFINISHED
    if file.is_file():
        if _load(file) != json.loads(json.dumps(wanted)):
            raise UserError(f"{folder}: holds an unfinished pack of something else; remove it, or name another folder")
        return True
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: is there and no unfinished pack; name a folder that is new or empty")
    folder.mkdir(parents=True, exist_ok=True)
    _write(file, wanted)
    return False


def fill(source: Source, folder: Path, settings: RunSettings, done: Callable[[int], None]) -> None:
    """Packs a split into its folder, from where an earlier try stopped; `done` is told how many samples lie there."""
    folder.mkdir(exist_ok=True)
    layout = Layout.of(source)
    partial = folder / "index.partial"
    with ExitStack() as stack:
        rows = stack.enter_context(open(partial, "ab", buffering=0))
        index = _whole_rows(partial, layout)
        os.truncate(partial, index.nbytes)
        files = {name: stack.enter_context(open(_pixels(folder, name), "ab")) for name in layout.pictures}
        for column, file in enumerate(files.values()):
            os.truncate(file.fileno(), _end(index, column, list(layout.pictures.values())[column]))
            file.seek(0, os.SEEK_END)
        done(len(index))
        count = len(index)
        for sample in _samples(source, count, settings):
            row = [value for name, file in files.items() for value in _append(file, sample[name])]
            row += [int(sample[name]) for name in layout.numbers]
            for file in files.values():
                file.flush()
            rows.write(np.array(row, dtype=np.int64).tobytes())  # last: a row stands for a whole sample
            count += 1
            done(count)
        for file in files.values():
            os.fsync(file.fileno())


def finish(folder: Path, sources: Mapping[str, Source]) -> None:
    """Turns filled folders into a packed one."""
    manifest = _load(folder / UNFINISHED)
    for split, source in sources.items():
        here = folder / split
        layout = Layout.of(source)
        if (here / "index.partial").is_file():
            np.save(here / "index.npy", _whole_rows(here / "index.partial", layout))
        _write(here / "names.json", [source.name_of(index) for index in range(len(source))])
        files = [_pixels(here, name) for name in layout.pictures]
        listed = {file.name: {"bytes": file.stat().st_size} for file in files}
        for file in (here / "index.npy", here / "names.json"):
            listed[file.name] = {"bytes": file.stat().st_size, "sha256": _sha256(file)}  # type: ignore[dict-item]
        manifest["splits"][split]["files"] = listed
    _write(folder / MANIFEST, manifest)
    (folder / UNFINISHED).unlink()
    for split in sources:
        (folder / split / "index.partial").unlink(missing_ok=True)


class PackedSplit:
    """A split of a packed folder, checked as far as that costs nothing; the pixels stay in the file."""

    def __init__(self, root: Path, split: str) -> None:
        manifest = read_manifest(root)
        if split not in manifest["splits"]:
            raise UserError(f"{root}: has no split {split!r}; it holds {', '.join(manifest['splits'])}")
        self.about, folder = manifest["splits"][split], root / split
        self.layout = Layout(self.about["pictures"], tuple(self.about["numbers"]))
        for name, listed in self.about["files"].items():
            _check_file(folder / name, listed)
        self.index = np.load(folder / "index.npy", allow_pickle=False)
        self.names: list[str] = _load(folder / "names.json")
        self.column = {name: number for number, name in enumerate(self.layout.columns)}
        self.files = {name: _pixels(folder, name) for name in self.layout.pictures}
        self.pixels = {
            name: np.memmap(file, dtype=np.uint8, mode="r").view(np.ndarray) for name, file in self.files.items()
        }
        # In memory that worker processes share: what one of them has checked, the others need not.
        self._checked = torch.zeros(len(self.index), dtype=torch.bool).share_memory_().numpy()

    def picture(self, name: str, number: int) -> np.ndarray:
        """One picture as it lies in the file, [height, width, channels]."""
        first = self.column[f"{name}.offset"]
        offset, height, width = self.index[number, first : first + 3].tolist()
        channels = self.layout.pictures[name]
        return self.pixels[name][offset : offset + height * width * channels].reshape(height, width, channels)

    def check(self, number: int) -> None:
        """Refuses a sample whose pixels are not those that were packed; looks once."""
        if self._checked[number]:
            return
        for name, file in self.files.items():
            if crc32(self.picture(name, number).data) != self.index[number, self.column[f"{name}.checksum"]]:
                raise UserError(f"{file}: {self.names[number]} is damaged (its checksum differs); pack it again")
        self._checked[number] = True


def read_manifest(root: Path) -> dict[str, Any]:
    """What a packed folder says about itself."""
    file = root / MANIFEST
    if not file.is_file():
        if (root / UNFINISHED).is_file():
            raise UserError(f"{root}: packing was not finished; the same `paceline pack` goes on with it")
        raise UserError(f"{root}: not a packed folder (it has no {MANIFEST}); paceline pack SRC {root} makes one")
    manifest = _load(file)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or "splits" not in manifest:
        raise UserError(f"{file}: not written by `paceline pack`")
    if manifest.get("version") != VERSION:
        raise UserError(
            f"{file}: version {manifest.get('version')} of the format, and this is {VERSION}; pack it again"
        )
    return manifest


def _check_file(file: Path, listed: Mapping[str, Any]) -> None:
    found = file.stat().st_size if file.is_file() else -1
    if found < 0:
        raise UserError(f"{file}: missing; pack it again")
    if found != listed["bytes"]:
        raise UserError(f"{file}: {found:,} bytes instead of {listed['bytes']:,}; pack it again")
    if "sha256" in listed and _sha256(file) != listed["sha256"]:
        raise UserError(f"{file}: damaged (its checksum differs); pack it again")


def _samples(source: Source, start: int, settings: RunSettings) -> Iterator[dict[str, np.ndarray]]:
    """The samples from one on, read ahead by worker processes where they have to be decoded."""
    if not decodes(source):
        settings = dataclasses.replace(settings, workers=0)
    together = max(1, BYTES_PER_READ * len(source) // bytes_needed(source)) if has_one_size(source) else 1
    reader = Workers(source, torch.device("cpu"), settings)
    starts = range(start, len(source), together)
    try:
        for piece in reader.load(in_order(low, min(low + together, len(source))) for low in starts):
            fields = {name: field.numpy() for name, field in channels_last(piece).items()}
            for row in range(len(fields["index"])):
                yield {name: field[row] for name, field in fields.items()}
    finally:
        reader.close()


def _append(file: BinaryIO, picture: np.ndarray) -> tuple[int, int, int, int]:
    height, width, _ = picture.shape
    content = np.ascontiguousarray(picture)
    offset = file.tell()
    file.write(content.data)
    return offset, height, width, crc32(content.data)


def _whole_rows(file: Path, layout: Layout) -> np.ndarray:
    width = len(layout.columns)
    rows = np.frombuffer(file.read_bytes()[: file.stat().st_size // (8 * width) * 8 * width], dtype=np.int64)
    return rows.reshape(-1, width)


def _end(index: np.ndarray, picture: int, channels: int) -> int:
    """Where the last whole picture of a field ends."""
    if not len(index):
        return 0
    offset, height, width = index[-1, picture * len(PLACE) : picture * len(PLACE) + 3].tolist()
    return offset + height * width * channels


def _pixels(folder: Path, name: str) -> Path:
    return folder / f"{name}.pixels"


def _load(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: damaged ({' '.join(str(error).split())}); pack it again") from None


def _write(file: Path, content: Any) -> None:
    beside = file.with_name(f"{file.name}.new")
    with open(beside, "w") as opened:
        json.dump(content, opened)
        opened.flush()
        os.fsync(opened.fileno())
    beside.rename(file)


def _sha256(file: Path) -> str:
    with open(file, "rb") as opened:
        digest = sha256()
        while block := opened.read(2**20):
            digest.update(block)
    return digest.hexdigest()
