"""Reads and writes `pack.json`, which describes a packed folder and includes a checksum of its own content."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from paceline.contracts.data_spec import INPUT, parse_spec, written_values
from paceline.contracts.recipe import DataSpec
from paceline.core.checksums import checksum_of_content
from paceline.core.errors import UserError
from paceline.core.files import write_json
from paceline.core.small_files import MAX_BYTES, parse_json, read_bounded, why
from paceline.data.panel_names import TARGET
from paceline.data.source import Source

FORMAT, VERSION = "paceline pack", 3
MANIFEST, UNFINISHED = "pack.json", "packing.json"
LOW = "low"  # field with the low-resolution version of the image
PLACE = ("offset", "height", "width", "checksum")  # index columns for each image field


class Layout(NamedTuple):
    """The image fields and number fields of a sample."""

    images: Mapping[str, int]  # number of channels by field
    numbers: tuple[str, ...]

    @classmethod
    def of(cls, source: Source) -> Layout:
        """Return the layout of a source's samples."""
        sample = source.read(0)
        images = {name: int(field.shape[-1]) for name, field in sample.items() if field.ndim == 3}
        return cls(images, tuple(name for name in sample if name not in images))

    @property
    def columns(self) -> list[str]:
        """The names of the index columns."""
        return [f"{name}.{what}" for name in self.images for what in PLACE] + list(self.numbers)


@dataclass(frozen=True)
class FileRecord:
    """Size and checksum of a file in a packed split, used to detect damage."""

    bytes: int
    sha256: str = ""  # empty for pixel files, which have a checksum per image in the index


@dataclass(frozen=True)
class SplitRecord:
    """The properties that identify a split and, after packing, its files."""

    count: int
    spec: DataSpec
    mixed: bool  # whether image sizes may differ
    images: Mapping[str, int]  # number of channels by field
    numbers: tuple[str, ...]
    names_sha256: str
    numbers_sha256: str
    files_sha256: str  # hash of the names, sizes and modification times of the source's files, if any
    fingerprint: str
    groups_sha256: str = ""  # hash of the samples' group names; empty if there are no groups
    files: Mapping[str, FileRecord] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        """The fields of a sample."""
        return Layout(self.images, self.numbers)

    @property
    def aligned(self) -> set[str]:
        """The image fields that have the channels of "image" and its size, which is divided by the scale for "low"."""
        return {INPUT, *self.spec.panels} | self.images.keys() & {LOW, TARGET}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> SplitRecord:
        """Parse a record from JSON; raise KeyError, TypeError, ValueError or AttributeError if it is malformed."""
        files = {name: FileRecord(**listed) for name, listed in content["files"].items()}
        read = {"spec": parse_spec(content["spec"]), "numbers": tuple(content["numbers"]), "files": files}
        record = cls(**{**content, **read})
        record._check()
        return record

    def _check(self) -> None:
        """Raise ValueError if the record contradicts itself or has values that no pack contains."""
        spec, fields = self.spec, [*self.images, *self.numbers]
        right = {
            "count": type(self.count) is int and 0 < self.count < 2**40,
            "mixed": type(self.mixed) is bool,
            "images": all(type(count) is int and count > 0 for count in self.images.values()),
            "fields": len(set(fields)) == len(fields) and all(map(is_file_name, fields)),
            "channels": all(self.images.get(name) == spec.channels for name in self.aligned),
            "size": min(spec.height, spec.width) > 0,
            "scale": spec.scale > 1 if LOW in self.images else spec.scale == 0,
            "class names": len(spec.class_names) in (0, spec.num_classes),
            "label": not spec.num_classes or "label" in self.numbers,
            "files": all(type(file.bytes) is int and isinstance(file.sha256, str) for file in self.files.values()),
        }
        wrong = [what for what, is_right in right.items() if not is_right]
        if wrong:
            raise ValueError(f"invalid {wrong[0]}")


@dataclass(frozen=True)
class Manifest:
    """The description of a packed folder, finished or in progress."""

    made_from: Mapping[str, str]  # settings of the `paceline pack` command
    splits: Mapping[str, SplitRecord]

    def write(self, file: Path) -> None:
        """Write the manifest with its checksum."""
        splits = {
            name: dataclasses.asdict(one) | {"spec": written_values(one.spec)} for name, one in self.splits.items()
        }
        content = {"format": FORMAT, "version": VERSION, "made_from": dict(self.made_from), "splits": splits}
        write_json(file, content | {"sha256": checksum_of_content(content)})


def read_manifest(root: Path) -> Manifest:
    """Return the manifest of a packed folder; raise UserError if the folder is not a finished pack."""
    file = root / MANIFEST
    if not file.is_file():
        if (root / UNFINISHED).is_file():
            raise UserError(f"{root}: packing was not finished; run the same `paceline pack` command again to resume")
        raise UserError(f"{root}: not a packed folder (it has no {MANIFEST}); create one with paceline pack SRC {root}")
    return load_manifest(file, root)


def load_manifest(file: Path, root: Path) -> Manifest:
    """Read and check the manifest of a packed folder, finished or in progress."""
    content = load_json(file, root)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{file}: not written by `paceline pack`; choose a different folder")
    if content.get("version") != VERSION:
        raise damaged(file, root, f"format version {content.get('version')}, expected {VERSION}")
    if content.pop("sha256", None) != checksum_of_content(content):
        raise damaged(file, root, "damaged (checksum mismatch)")
    try:
        splits = {split: SplitRecord.from_json(record) for split, record in content["splits"].items()}
        if not splits or not all(map(is_file_name, splits)):
            raise ValueError("invalid splits")
        return Manifest(dict(content["made_from"]), splits)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise damaged(file, root, f"damaged (not a valid manifest: {why(error)})") from None


def load_json(file: Path, root: Path, max_bytes: int = MAX_BYTES) -> Any:
    """Return the content of a JSON file in a packed folder."""
    try:
        return parse_json(read_bounded(file, max_bytes))
    except (OSError, ValueError) as error:
        raise damaged(file, root, f"damaged ({why(error)})") from None


def is_file_name(name: object) -> bool:
    """Return whether a name from a file can be the name of a file or folder, so that it does not lead elsewhere."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & {"/", "\0"} and len(name) < 100


def damaged(file: Path, root: Path, what: str) -> UserError:
    """Return the error for a file in a packed folder that cannot be used."""
    return UserError(f"{file}: {what}; delete {root} and pack again")
