"""Weights files from strangers are either read correctly or rejected in one line, without much memory or time."""

from __future__ import annotations

import json
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.cli.app import run
from paceline.core.errors import UserError
from paceline.models import torch_file
from paceline.models.torch_file import read_state_dict
from paceline.runs.weights import read_tensors

BASE = torch.arange(24.0)
TENSORS: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: BASE,
    "parameter": lambda: nn.Parameter(BASE),
    "view": lambda: BASE[4:10],
    "transposed": lambda: BASE.view(4, 6).t(),
    "channels last": lambda: BASE.view(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
    "repeated": lambda: torch.ones(1).expand(64),
    "scalar": lambda: torch.tensor(3.0),
    "empty": lambda: torch.zeros(0, 3),
    "half": lambda: BASE.half(),
    "bfloat16": lambda: BASE.bfloat16(),
    "float8": lambda: BASE.to(torch.float8_e4m3fn),
    "uint16": lambda: BASE.to(torch.uint16),
    "bool": lambda: BASE > 3,
    "negated": lambda: torch.complex(BASE, BASE).conj().imag,
}


def equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.float(), other.detach().float())


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_of_every_common_kind_are_read(kind, is_zip, tmp_path):
    if not is_zip and kind in ("float8", "uint16"):
        pytest.skip("older torch versions, which wrote this format, have no such tensors")
    state = {"a.weight": TENSORS[kind](), "b.weight": TENSORS[kind]()}
    torch.save({"model": state, "epoch": 3}, tmp_path / "x.pth", _use_new_zipfile_serialization=is_zip)
    found = read_state_dict(tmp_path / "x.pth")
    assert list(found) == list(state) and all(equal(found[key], value) for key, value in state.items())


def test_views_of_one_storage_and_names_that_are_numbers_are_read(tmp_path):
    state = {number: BASE[number : number + 5] for number in range(10)}
    torch.save(OrderedDict(state), tmp_path / "x.pth")
    found = read_state_dict(tmp_path / "x.pth")
    assert all(torch.equal(found[str(number)], value) for number, value in state.items())


def write_zip(path: Path, pickled: bytes, storage: bytes = b"", compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in (("data.pkl", pickled), ("byteorder", b"little"), ("data/0", storage), ("version", b"3")):
            archive.writestr(f"archive/{name}", content)


def text(word: str) -> bytes:
    return b"X" + struct.pack("<I", len(word)) + word.encode()


def tensor(count: int, size: int, stride: int = 1) -> bytes:
    """Return the pickle of a float32 tensor whose storage has `count` elements."""
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + number(count) + b"tQ"
    layout = number(0) + number(size) + b"\x85" + number(stride) + b"\x85\x89ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + layout + b"tR"


def number(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


def entry(value: bytes, key: bytes = text("w")) -> bytes:
    return b"\x80\x02}" + key + value + b"s."


NESTED = b")" + b"".join(b"q" + bytes([level]) + 2 * (b"h" + bytes([level])) + b"\x86" for level in range(60))
PICKLES = {
    "a tuple as key that takes forever to hash": (entry(number(1), NESTED), "very large tuple"),
    "an allocation of 64 GB": (entry(b"cbuiltins\nbytearray\n" + number(2**36) + b"\x85R"), "contains bytes"),
    "a storage that is larger than its record": (entry(tensor(10**9, 10**9)), "x.pth: "),
    "a tensor outside its storage": (entry(tensor(1, 100)), "x.pth: "),
    "a negative stride": (entry(tensor(4, 4, -1)), "x.pth: "),
    "a repeated element": (entry(tensor(1, 10**11, 0)), "its content takes 400,000,000,000 bytes, more than 10 times"),
    "no end": (b"\x80\x02}", "x.pth: "),
    "a cut string": (b"\x80\x02X\xff\xff\xff\x7fabc", "x.pth: "),
}


@pytest.mark.parametrize("name", PICKLES)
def test_pickles_by_attackers_are_rejected(name, tmp_path):
    pickled, line = PICKLES[name]
    write_zip(tmp_path / "x.pth", pickled, bytes(4))
    assert line in rejected(tmp_path / "x.pth")


def rejected(path: Path) -> str:
    """Return the error for a file, which must be a single line."""
    with pytest.raises(UserError) as raised:
        read_state_dict(path)
    line = str(raised.value)
    assert line.startswith(f"{path}: ") and len(line) < 1000 and len(line.splitlines()) == 1
    return line


def cyclic(key: str, **others: Any) -> dict[str, Any]:
    content: dict[str, Any] = {**others}
    content[key] = {"state_dict": content, **others}
    return content


CONTENTS = {
    "a dict in itself": (cyclic("model"), "nested more than 100 deep, or contain themselves"),
    "a dict in itself among others": (cyclic("model", w=BASE, epoch=3), "nested more than 100 deep"),
    "1,500 prefixes": ({"module." * 1500 + "w": BASE}, "a tensor's name has 10,501 characters"),
    "many generators": ({"generator." * 15_000 + "w": BASE}, "a tensor's name has 150,001 characters"),
    "a list in itself": ((lambda one: (one.append(one), {"w": one})[1])([]), "'w' is not a tensor"),
    "a meta tensor": ({"w": BASE.to("meta")}, "'w' is not a plain tensor of real numbers (meta"),
    "a sparse tensor": ({"w": torch.eye(3).to_sparse()}, "(cpu, torch.sparse_coo"),
    "a huge sparse tensor": (
        {"w": torch.sparse_coo_tensor(torch.tensor([[1], [1]]), torch.ones(1), (10**6, 10**6))},
        "(cpu, torch.sparse_coo",
    ),
    "a nested tensor": ({"w": torch.nested.nested_tensor([BASE, BASE[:3]])}, "contains objects other than tensors"),
    "complex numbers": ({"w": torch.complex(BASE, BASE)}, "torch.complex64"),
    "repeated elements": ({"w": torch.zeros(1).expand(3000, 3000, 300)}, "its content takes 10,800,000,000 bytes"),
    "a name that is not text": ({("w", 1): BASE, "x": None}, "'x' is not a tensor"),
    "no dict": (BASE, "contains no state_dict"),
    "infinity": ({"w": torch.tensor([torch.inf], dtype=torch.bfloat16)}, "w contains NaN"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("name", CONTENTS)
def test_content_that_is_no_plain_state_dict_is_rejected(name, is_zip, tmp_path):
    content, line = CONTENTS[name]
    torch.save(content, tmp_path / "x.pth", _use_new_zipfile_serialization=is_zip)
    assert line in rejected(tmp_path / "x.pth")


@pytest.mark.filterwarnings("ignore")  # torch warns that quantized tensors are deprecated
def test_quantized_tensors_are_rejected(tmp_path):
    torch.save({"w": torch.quantize_per_tensor(BASE, 0.1, 0, torch.qint8)}, tmp_path / "x.pth")
    assert "'w' is not a plain tensor of real numbers (cpu, torch.strided, torch.qint8)" in rejected(tmp_path / "x.pth")


def test_a_compressed_archive_is_read_unless_it_expands_too_far(tmp_path):
    write_zip(tmp_path / "x.pth", entry(tensor(24, 24)), BASE.numpy().tobytes(), zipfile.ZIP_DEFLATED)
    assert torch.equal(read_state_dict(tmp_path / "x.pth")["w"], BASE)
    write_zip(tmp_path / "bomb.pth", entry(tensor(2**20, 2**20)), bytes(2**22), zipfile.ZIP_DEFLATED)
    assert "more than 10 times the file's" in rejected(tmp_path / "bomb.pth")


def test_a_pickle_that_takes_too_long_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_file, "MAX_OPERATIONS", 1000)
    torch.save({str(number): number for number in range(1000)}, tmp_path / "x.pth")
    assert "takes more than 1,000 operations to load" in rejected(tmp_path / "x.pth")


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_file_that_ends_early_is_rejected_wherever_it_ends(is_zip, tmp_path):
    torch.save({"a.weight": BASE, "b": BASE.half()}, tmp_path / "all.pth", _use_new_zipfile_serialization=is_zip)
    content = (tmp_path / "all.pth").read_bytes()
    for end in range(0, len(content), 17):
        (tmp_path / "x.pth").write_bytes(content[:end])
        rejected(tmp_path / "x.pth")


def write_safetensors(path: Path, header: object, data: bytes = bytes(4), size: int = 0) -> None:
    words = header if isinstance(header, bytes) else json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(words)) + words + data)
        file.truncate(max(size, file.tell()))


def described(dtype: str = "F32", shape: tuple[int, ...] = (1,), end: int = 4) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}


HEADERS = {
    "tensors that overlap": {"a": described(), "b": described()},
    "an unknown data type": {"a": described("F33")},
    "six-bit numbers": {"a": described("F6_E2M3", (4,), 3)},
    "a product that overflows": {"a": described(shape=(2**40, 2**40))},
    "a negative size": {"a": described(shape=(-1,))},
    "complex numbers": {"a": described("C64", (1,), 4)},
    "a long name": {"module." * 1500 + "w": described()},
    "nothing": {},
    "a list": [],
    "deep nesting": b"[" * 10_000,
    "no data": {"a": described(shape=(100,), end=400)},
}


@pytest.mark.parametrize("name", HEADERS)
def test_invalid_safetensors_files_are_rejected(name, tmp_path):
    write_safetensors(tmp_path / "x.safetensors", HEADERS[name])
    rejected(tmp_path / "x.safetensors")


@pytest.mark.parametrize("aliases", ["[1]", '"x"', '{"b": ["a"]}', '{"b": "c"}', "[" * 100_000])
def test_invalid_aliases_in_a_weights_file_are_rejected(aliases, tmp_path, capsys):
    write_safetensors(tmp_path / "x.safetensors", {"__metadata__": {"paceline.aliases": aliases}, "a": described()})
    with pytest.raises(ValueError):
        read_tensors(tmp_path / "x.safetensors")
    assert run(["apply", str(tmp_path / "x.safetensors"), "x.png", "--out", str(tmp_path / "out")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


SPARSE = [["import", "--out", "y.safetensors"], ["apply", "x.png", "--out", "y"], ["export", "--out", "y.onnx"]]
SPARSE += [["train", "dcgan", "--out", "y", "--init-from"]]


@pytest.mark.parametrize("words", SPARSE)
def test_an_incomplete_file_of_100_gb_is_rejected_without_reading_it(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    size = 100 * 10**9
    try:
        write_safetensors(Path("x.safetensors"), {"a.weight": described(shape=(size // 4,), end=size)}, b"", size + 99)
    except OSError:
        pytest.skip("this file system has no sparse files of 100 GB")
    assert run([words[0], *words[1:], "x.safetensors"] if "train" in words else [words[0], "x.safetensors", *words[1:]])
    printed = capsys.readouterr().err
    assert "x.safetensors: cannot be read" in printed and "bytes are on the disk" in printed
    assert len(printed.splitlines()) == 1


def test_headers_that_are_too_long_to_parse_are_rejected(tmp_path):
    write_safetensors(tmp_path / "x.safetensors", b" " * (2**24 + 1))
    assert "at most 16,777,216 are supported" in rejected(tmp_path / "x.safetensors")
