"""Packed folders as a stranger could make them: the checksums are right, but the content need not be.

They are written without Paceline's own writer.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

COUNT, SIDE = 12, 8
ZERO = "0" * 64


class Split:
    """The content of one split, before it is written."""

    def __init__(self, seed: int) -> None:
        self.images = np.random.default_rng(seed).integers(0, 256, (COUNT, SIDE, SIDE, 3), dtype=np.uint8)
        self.pixels = {"image": self.images.tobytes()}
        size = self.images[0].nbytes
        rows = [
            [number * size, SIDE, SIDE, zlib.crc32(image.tobytes()), number % 2]
            for number, image in enumerate(self.images)
        ]
        self.index = np.array(rows, dtype=np.int64)
        self.index_file = b""  # replaces the content of `index` if it is set
        self.names: Any = [f"{number}.png" for number in range(COUNT)]
        self.groups: Any = None
        self.unlisted: tuple[str, ...] = ()  # files that pack.json does not list
        self.spec: dict[str, Any] = {
            "channels": 3, "height": SIDE, "width": SIDE, "num_classes": 2, "class_names": ["cat", "dog"],
            "flip_allowed": True, "scale": 0, "panels": [], "dtype": "uint8", "value_range": None,
        }  # fmt: skip
        self.record: dict[str, Any] = {
            "count": COUNT, "spec": self.spec, "mixed": False, "images": {"image": 3}, "numbers": ["label"],
            "names_sha256": ZERO, "numbers_sha256": ZERO, "files_sha256": ZERO, "fingerprint": ZERO[:32],
            "groups_sha256": "",
        }  # fmt: skip

    def write(self, folder: Path) -> dict[str, Any]:
        folder.mkdir(parents=True)
        buffer = io.BytesIO()
        np.save(buffer, self.index)
        files = {f"{name}.pixels": content for name, content in self.pixels.items()}
        checked = {"index.npy": self.index_file or buffer.getvalue(), "names.json": json.dumps(self.names).encode()}
        if self.groups is not None:
            checked["groups.json"] = json.dumps(self.groups).encode()
        for name, content in (files | checked).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        listed = {name: {"bytes": len(content), "sha256": ""} for name, content in files.items()}
        listed |= {
            name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in checked.items()
        }
        kept = {name: one for name, one in listed.items() if name not in self.unlisted}
        return {"files": kept} | self.record


class Pack:
    """A packed folder for classification, before it is written."""

    def __init__(self) -> None:
        self.splits = {"train": Split(1), "test": Split(2)}
        self.train = self.splits["train"]
        self.spec, self.record, self.index = self.train.spec, self.train.record, self.train.index
        self.content: dict[str, Any] = {}  # replaces values in pack.json

    def write(self, root: Path) -> None:
        splits = {name: split.write(root / name) for name, split in self.splits.items()}
        content = {"format": "paceline pack", "version": 3, "made_from": {"data": "folder"}, "splits": splits}
        content |= self.content
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        (root / "pack.json").write_text(json.dumps(content | {"sha256": digest}))

    def add_field(self, name: str, channels: int = 3, side: int = SIDE) -> None:
        """Add an image field, as of a panel, to both splits."""
        for split in self.splits.values():
            images = np.zeros((COUNT, side, side, channels), np.uint8)
            size = images[0].nbytes
            places = [[n * size, side, side, zlib.crc32(images[0].tobytes())] for n in range(COUNT)]
            split.pixels[name] = images.tobytes()
            split.record["images"] = split.record["images"] | {name: channels}
            split.index = np.concatenate([split.index[:, :-1], np.array(places), split.index[:, -1:]], axis=1)


def _set(where: str, **values: Any) -> Callable[[Pack], object]:
    return lambda pack: getattr(pack, where).update(values)


def _index(row: int | slice, column: int, value: Any) -> Callable[[Pack], object]:
    def change(pack: Pack) -> None:
        pack.index[row, column] = value

    return change


def _replace(**values: Any) -> Callable[[Pack], object]:
    return lambda pack: vars(pack.train).update(values)


def _header(text: str, data: bytes = b"") -> Callable[[Pack], object]:
    padded = text.encode() + b" " * (117 - len(text)) + b"\n"
    content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(padded)) + padded + data
    return _replace(index_file=content)


def _zip(pack: Pack) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("index.npy", b"")
    pack.train.index_file = buffer.getvalue()


def _outside(pack: Pack) -> None:
    pack.train.pixels = {"../../outside": pack.train.pixels["image"]} | pack.train.pixels
    pack.record["images"] = {"image": 3, "../../outside": 3}
    pack.train.index = np.concatenate([pack.index[:, :4], pack.index], axis=1)


def _moved_split(pack: Pack) -> None:
    pack.splits["../elsewhere"] = Split(3)


def _overlap(pack: Pack) -> None:
    pack.index[1] = pack.index[0]


def _twice(pack: Pack) -> None:
    pack.index[:, 0] = pack.index[::-1, 0]
    pack.index[:, 3] = pack.index[::-1, 3]


def _huge_sides(pack: Pack) -> None:
    pack.index[:, 1:3] = 2**32


def _with_low(side: int, scale: int) -> Callable[[Pack], object]:
    def change(pack: Pack) -> None:
        for split in pack.splits.values():
            split.spec["scale"] = scale
        pack.add_field("low", side=side)

    return change


def _with_panel(name: str, channels: int, side: int = SIDE) -> Callable[[Pack], object]:
    def change(pack: Pack) -> None:
        for split in pack.splits.values():
            split.spec["panels"] = ["dab"]
        pack.add_field(name, channels, side)

    return change


DAMAGES: dict[str, Callable[[Pack], object]] = {
    "an index of 3 rows": lambda pack: _replace(index=pack.index[:3])(pack),
    "an index with a column more": lambda pack: _replace(index=np.pad(pack.index, ((0, 0), (0, 1))))(pack),
    "an index with one dimension": lambda pack: _replace(index=pack.index.ravel())(pack),
    "an index of floats": lambda pack: _replace(index=pack.index.astype(float))(pack),
    "an index of other byte order": lambda pack: _replace(index=pack.index.astype(">i8"))(pack),
    "an index of pickled objects": lambda pack: _replace(index=pack.index.astype(object))(pack),
    "an index that is text": _replace(index_file=b"hello"),
    "an index that is a zip file": _zip,
    "an index that is a huge array": _header(
        "{'descr': '<i8', 'fortran_order': False, 'shape': (1099511627776, 5), }"
    ),
    "an index of negative shape": _header("{'descr': '<i8', 'fortran_order': False, 'shape': (-1, 5), }", bytes(480)),
    "an index whose header is no dictionary": _header("'''{'descr"),
    "an index whose header is nested deeply": _header("(" * 110),
    "an index cut in the middle": lambda pack: _header(
        "{'descr': '<i8', 'fortran_order': False, 'shape': (12, 5), }", pack.index.tobytes()[:-9]
    )(pack),
    "a count above the rows": _set("record", count=32),
    "a count of zero": _set("record", count=0),
    "a count that is text": _set("record", count="12"),
    "a count that is true": _set("record", count=True),
    "a huge count": _set("record", count=10**400),
    "offsets outside the file": _index(3, 0, 10**9),
    "a negative offset": _index(3, 0, -192),
    "offsets that overlap": _overlap,
    "offsets in another order": _twice,
    "a height of zero": _index(3, 1, 0),
    "a height and width that changed places with others": _index(slice(None), 1, 16),
    "another height": _index(3, 1, 4),
    "sides whose product overflows": _huge_sides,
    "a checksum above 32 bits": _index(3, 3, 2**40),
    "a label above the classes": _index(3, 4, 2),
    "a negative label": _index(3, 4, -1),
    "another image's checksum": _index(3, 3, 12345),
    "a field outside the folder": _outside,
    "a split outside the folder": _moved_split,
    "a field whose name is not text": _set("record", images={"image": 3, "": 3}),
    "a field with a NUL": _set("record", images={"image": 3, "a\0b": 3}),
    "a field of 5,000 characters": _set("record", images={"image": 3, "a" * 5000: 3}),
    "no field image": _set("record", images={"photo": 3}),
    "no fields": _set("record", images={}),
    "fields that are a list": _set("record", images=["image"]),
    "other channels in the fields": _set("record", images={"image": 4}),
    "channels that are text": _set("record", images={"image": "3"}),
    "a field twice": _set("record", numbers=["label", "label"]),
    "a number called image": _set("record", numbers=["image"]),
    "numbers that are null": _set("record", numbers=None),
    "no label": _set("record", numbers=["other"]),
    "mixed that is text": _set("record", mixed="no"),
    "a key that is unknown": _set("record", extra=1),
    "a spec that is a list": _set("record", spec=[]),
    "files that are a list": _set("record", files=["index.npy"]),
    "files of negative size": _set("record", files={"index.npy": {"bytes": -1}}),
    "no files": _set("record", files={}),
    "a file outside the folder": lambda pack: _replace(unlisted=("names.json",))(pack)
    or pack.train.pixels.update({"../../../outside": b"abc"}),
    "an index that is not listed": _replace(unlisted=("index.npy",)),
    "pixels that are not listed": _replace(unlisted=("image.pixels",)),
    "pixels that are missing": lambda pack: pack.train.pixels.update(image=b""),
    "pixels that are too many": lambda pack: pack.train.pixels.update(image=pack.train.pixels["image"] + b"x"),
    "an unknown data type": _set("spec", dtype="int64"),
    "a data type that is an object": _set("spec", dtype="O"),
    "a data type of other width": _set("spec", dtype="uint16"),
    "a height in the spec that is text": _set("spec", height="8"),
    "a height in the spec that differs": _set("spec", height=16),
    "a width in the spec that is negative": _set("spec", width=-8),
    "a width in the spec that is huge": _set("spec", width=10**30),
    "channels in the spec that differ": _set("spec", channels=1),
    "classes that are negative": _set("spec", num_classes=-2, class_names=[]),
    "more class names than classes": _set("spec", class_names=["a", "b", "c"]),
    "class names that are text": _set("spec", class_names="ab"),
    "a scale without a field low": _set("spec", scale=4),
    "a scale that is negative": _set("spec", scale=-1),
    "panels without their images": _set("spec", panels=["dab"]),
    "a value range that is reversed": _set("spec", value_range=[1, 0]),
    "a value range of NaN": _set("spec", value_range=[float("nan"), 1]),
    "a value range of huge integers": _set("spec", value_range=[0, 10**400]),
    "flip_allowed that is text": _set("spec", flip_allowed="yes"),
    "empty classes that are all": _set("spec", empty_classes=[0, 1]),
    "a key of the spec that is missing": lambda pack: pack.spec.pop("width"),
    "a key of the spec that is unknown": _set("spec", depth=3),
    "a low-resolution image of the wrong size": _with_low(3, 2),
    "a low-resolution image without a scale": _with_low(4, 0),
    "a panel of other channels": _with_panel("dab", 1),
    "a panel of another size": _with_panel("dab", 3, 4),
    "names that are too few": _replace(names=["a"]),
    "names that are numbers": _replace(names=list(range(COUNT))),
    "groups that are too few": _replace(groups=["a"]),
    "groups that are nested": _replace(groups=[["a"]] * COUNT),
    "splits that are a list": lambda pack: pack.content.update(splits=[]),
    "no splits": lambda pack: pack.content.update(splits={}),
    "only a test split": lambda pack: pack.splits.pop("train"),
    "made_from that is a number": lambda pack: pack.content.update(made_from=3),
    "another format": lambda pack: pack.content.update(format=["paceline pack"]),
    "another version": lambda pack: pack.content.update(version=float("inf")),
}  # fmt: skip

GOOD: dict[str, Callable[[Pack], object]] = {
    "nothing changed": lambda pack: None,
    "names with control characters": _replace(names=["\x1b[2J\n"] * COUNT),
    "names that occur twice": _replace(names=["a"] * COUNT),
    "no class names": _set("spec", class_names=[]),
    "groups": _replace(groups=[str(number // 2) for number in range(COUNT)]),
    "sizes that may differ": _set("record", mixed=True),
    "no flips": _set("spec", flip_allowed=False),
}
