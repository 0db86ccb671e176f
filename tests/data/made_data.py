"""Functions that write small data sets in each source's layout. To test a new source, add a writer here."""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.commands.pack import pack
from paceline.contracts.recipe import Batch
from paceline.data.loader import Loader
from paceline.data.stream import Tickets


def raw_batches(loader: Loader, requests: Iterable[Tickets]) -> Iterator[Batch]:
    """Return the batch that the loader yields for each request, before any transforms."""
    return map(loader.finish, loader.fetch(requests))


def random_images(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def save_image(file: Path, height: int, width: int, seed: int = 0, **options: object) -> None:
    """Save a random image."""
    file.parent.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng([seed, height, width])
    Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(file, **options)  # type: ignore[arg-type]


def write_packed(root: Path, requested: dict[str, int]) -> None:
    """Pack a small folder of images with the requested size and channels."""
    unpacked = root.with_name("unpacked")
    write_folder(unpacked, pytest.MonkeyPatch())
    assert pack(str(unpacked), str(root), {"data": "folder", "workers": 0}, requested) == 0


def write_digits(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write nothing, because the digits ship with Paceline."""


def write_npz(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = np.arange(12) % 3
    np.savez(
        root / "own.npz",
        x_train=random_images(12, 8, 8, 3),
        y_train=labels,
        x_test=random_images(6, 8, 8, 3),
        y_test=labels[:6],
    )


def write_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split, count in (("train", 4), ("test", 2)):
        for kind in ("cat", "dog"):
            folder = root / split / kind
            folder.mkdir(parents=True)
            for number, image in enumerate(random_images(count, 10, 12, 3)):
                Image.fromarray(image).save(folder / f"{number}.png")


def write_photos(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save images of equal size, so that they can be batched without cropping."""
    for split, count in (("train", 4), ("test", 2)):
        (root / split).mkdir()
        for number, image in enumerate(random_images(count, 14, 20, 3)):
            Image.fromarray(image).save(root / split / f"{number}.png")


def write_pairs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split, count in (("train", 4), ("test", 2)):
        for kind, darker in (("blurry", 2), ("sharp", 1)):
            (root / split / kind / "scene").mkdir(parents=True)
            for number, image in enumerate(random_images(count, 14, 20, 3)):
                Image.fromarray(image // darker).save(root / split / kind / "scene" / f"{number}.png")


def write_panels(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save rows of two panels."""
    for split, count in (("train", 4), ("test", 2)):
        (root / split).mkdir()
        for number, row in enumerate(random_images(count, 14, 28, 3)):
            Image.fromarray(row).save(root / split / f"{number}.png")


def write_shards(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write one tar file per split, and keep the index in a temporary folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(root.with_name("user-cache")))
    for split, count in (("train", 8), ("test", 4)):
        members = {}
        for number, image in enumerate(random_images(count, 10, 12, 3)):
            members |= {f"{number:04d}.png": encode_png(image), f"{number:04d}.cls": b"%d" % (number % 2)}
        write_tar(root / f"{split}-0.tar", members)


def encode_png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def write_tar(
    file: Path, members: Mapping[str, bytes] | Iterable[tuple[str, bytes]], kind: int = tarfile.PAX_FORMAT
) -> None:
    """Write a tar file. Several members may have the same name if they are given as pairs."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w", format=kind) as archive:
        for name, content in members.items() if isinstance(members, Mapping) else members:
            header = tarfile.TarInfo(name)
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))


def write_cifar(dataset: str, num_classes: int, label_key: str) -> Callable[[Path, pytest.MonkeyPatch], None]:
    def write(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import torchvision.datasets

        kind = getattr(torchvision.datasets, dataset)
        folder = root / kind.base_folder
        folder.mkdir()
        for attribute in ("train_list", "test_list"):
            known = []
            for file, _ in getattr(kind, attribute):
                rows = {"data": random_images(4, 3072), label_key: [0, 1, 2, num_classes - 1]}
                known.append([file, write_pickle(folder / file, rows)])
            monkeypatch.setattr(kind, attribute, known)
        names = {kind.meta["key"]: [f"class {number}" for number in range(num_classes)]}
        checksum = write_pickle(folder / kind.meta["filename"], names)
        monkeypatch.setattr(kind, "meta", kind.meta | {"md5": checksum})

    return write


def write_pickle(file: Path, content: object) -> str:
    file.write_bytes(pickle.dumps(content))
    return md5(file)


def md5(file: Path) -> str:
    return hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest()


def write_mnist(folder: str) -> Callable[[Path, pytest.MonkeyPatch], None]:
    def write(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        raw = root / folder / "raw"
        raw.mkdir(parents=True)
        for file, content in mnist_files().items():
            (raw / file).write_bytes(content)

    return write


def mnist_files() -> dict[str, bytes]:
    files = {}
    for split, count in (("train", 12), ("t10k", 6)):
        sizes = [count, 28, 28]
        header = b"\x00\x00\x08\x03" + b"".join(size.to_bytes(4, "big") for size in sizes)
        files[f"{split}-images-idx3-ubyte"] = header + random_images(*sizes).tobytes()
        labels = (np.arange(count) % 10).astype(np.uint8).tobytes()
        files[f"{split}-labels-idx1-ubyte"] = b"\x00\x00\x08\x01" + count.to_bytes(4, "big") + labels
    return files


def zip_files(folder: Path, files: dict[str, bytes]) -> list[tuple[str, str]]:
    """Compress each file with gzip, and return the file names with their checksums."""
    resources = []
    for name, content in files.items():
        file = folder / f"{name}.gz"
        file.write_bytes(gzip.compress(content, mtime=0))
        resources.append((file.name, md5(file)))
    return resources


def write_svhn(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import scipy.io
    import torchvision.datasets

    known = dict(torchvision.datasets.SVHN.split_list)
    for split, count in (("train", 12), ("test", 6)):
        url, file, _ = known[split]
        labels = np.arange(1, count + 1)[:, None] % 10 + 1  # SVHN labels the digit 0 as 10
        scipy.io.savemat(root / file, {"X": random_images(32, 32, 3, count), "y": labels})
        known[split] = [url, file, md5(root / file)]
    monkeypatch.setattr(torchvision.datasets.SVHN, "split_list", known)


def write_stl10(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision.datasets

    kind = torchvision.datasets.STL10
    folder = root / kind.base_folder
    folder.mkdir()
    for split, count in (("train", 4), ("test", 2), ("unlabeled", 1)):
        (folder / f"{split}_X.bin").write_bytes(random_images(count, 3, 96, 96).tobytes())
        (folder / f"{split}_y.bin").write_bytes(np.arange(1, count + 1, dtype=np.uint8).tobytes())
    for attribute in ("train_list", "test_list"):
        known = [[file, md5(folder / file)] for file, _ in getattr(kind, attribute)]
        monkeypatch.setattr(kind, attribute, known)


writers: dict[str, Callable[[Path, pytest.MonkeyPatch], None]] = {
    "digits": write_digits,
    "npz": write_npz,
    "folder": write_folder,
    "photos": write_photos,
    "pairs": write_pairs,
    "degraded": write_photos,
    "panels": write_panels,
    "shards": write_shards,
    "cifar10": write_cifar("CIFAR10", 10, "labels"),
    "cifar100": write_cifar("CIFAR100", 100, "fine_labels"),
    "mnist": write_mnist("MNIST"),
    "fashion_mnist": write_mnist("FashionMNIST"),
    "svhn": write_svhn,
    "stl10": write_stl10,
}
