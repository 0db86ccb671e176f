"""Sources for torchvision data sets, tested with a few synthetic samples in the original file layouts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.error import URLError

import numpy as np
import pytest
import torchvision.datasets
from made_data import mnist_files, random_images, zip_files

from paceline.config.settings import RunSettings
from paceline.core import registry
from paceline.core.errors import UserError
from paceline.data.source import Source
from paceline.data.sources.cifar10 import Cifar10
from paceline.data.sources.cifar100 import Cifar100
from paceline.data.sources.mnist import Mnist
from paceline.data.sources.stl10 import Stl10
from paceline.data.sources.svhn import Svhn

NAMES = ["cifar10", "cifar100", "fashion_mnist", "mnist", "stl10", "svhn"]


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


@pytest.mark.parametrize("name", NAMES)
def test_without_a_network_the_error_names_the_missing_files_and_their_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise URLError("no route\nto host")

    monkeypatch.setattr("urllib.request.urlopen", fail)
    source = registry.load_class("source", name, Source)
    with pytest.raises(UserError, match=f"--data-root {tmp_path}: {name} is missing or incomplete") as raised:
        source("train", RunSettings(data_root=str(tmp_path)))
    assert source.expected in str(raised.value) and "\n" not in str(raised.value)  # type: ignore[attr-defined]


def test_a_file_instead_of_a_folder_is_rejected_with_the_source_that_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "cifar10.npz"
    file.touch()
    with pytest.raises(UserError, match=f"--data-root {file}: is a file, not a folder; use --data npz"):
        Mnist("train", RunSettings(data_root=str(file)))


def test_a_damaged_file_is_rejected(make_data) -> None:
    settings = make_data("mnist")
    file = Path(settings.data_root, "MNIST/raw/train-images-idx3-ubyte")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="mnist is missing or incomplete"):
        Mnist("train", settings)


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write to read-only folders")
def test_a_read_only_folder_is_read_without_a_lock(make_data) -> None:
    settings = make_data("mnist")
    Path(settings.data_root).chmod(0o555)
    assert len(Mnist("train", settings)) == 12


def test_a_folder_that_cannot_be_locked_is_still_read(make_data) -> None:
    settings = make_data("mnist")
    Path(settings.data_root, ".lock-mnist").mkdir()
    assert len(Mnist("train", settings)) == 12


def test_cifar10_images_and_labels_match_the_files(make_data) -> None:
    settings = make_data("cifar10")
    rows = random_images(4, 3072).reshape(4, 3, 32, 32).transpose(0, 2, 3, 1)
    source = Cifar10("test", settings)
    assert np.array_equal(source.arrays["image"], rows)
    assert source.arrays["label"].tolist() == [0, 1, 2, 9]
    assert len(Cifar10("train", settings)) == 20


def test_cifar100_has_its_hundred_fine_classes(make_data) -> None:
    source = Cifar100("test", make_data("cifar100"))
    assert source.spec.num_classes == 100 and source.arrays["label"].tolist() == [0, 1, 2, 99]


def test_without_scipy_svhn_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Svhn, "package", "no_such_package")
    with pytest.raises(UserError, match=r"no_such_package is not installed: pip install 'paceline\[svhn\]'"):
        Svhn("train", RunSettings(data="svhn", data_root=str(tmp_path / "data")))
    assert not (tmp_path / "data").exists()


def test_svhn_labels_the_digit_zero_as_zero(make_data) -> None:
    source = Svhn("test", make_data("svhn"))
    assert source.arrays["label"].tolist() == [2, 3, 4, 5, 6, 7]
    assert np.array_equal(source.arrays["image"][1], random_images(32, 32, 3, 6)[..., 1])


def test_stl10_images_are_upright_and_labels_start_at_zero(make_data) -> None:
    source = Stl10("test", make_data("stl10"))
    assert np.array_equal(source.arrays["image"], random_images(2, 3, 96, 96).transpose(0, 3, 2, 1))
    assert source.arrays["label"].tolist() == [0, 1]
