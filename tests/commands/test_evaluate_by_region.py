"""`paceline evaluate` on images that are too large to be decoded as a whole: the same metrics as for whole images."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tifffile
from photographs import photograph
from PIL import Image
from test_apply import TRANSLATING, write_random_weights

from paceline.cli.app import run
from paceline.core.errors import UserError
from paceline.data.image_files import accepting_huge_images
from paceline.data.sources.pairs import Pairs
from paceline.images.rectangles import Box
from paceline.images.regions import open_any_image

PHOTO = np.tile(photograph("astronaut")[:110, :150], (2, 1, 1))  # 220 rows, 150 columns
MODULES = ("decode", "regions", "deep")
WEIGHTS = {
    "twice": ("super_resolution", ["scale=2", "num_blocks=1", "width=2"]),
    "clean": ("restoration", ["width=2", "depth=2"]),
    "stains": ("translation", TRANSLATING),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights files, and folders whose images are tiled TIFFs."""
    folder = tmp_path_factory.mktemp("evaluated")
    for name, (recipe, settings) in WEIGHTS.items():
        write_random_weights(folder / f"{name}.safetensors", recipe, settings)
    rng = np.random.default_rng(0)
    noisy = np.clip(PHOTO + rng.normal(0, 9, PHOTO.shape), 0, 255).astype(np.uint8)
    write(folder / "high/a.tif", PHOTO[:-1, :-1])
    write(folder / "high/b.tif", PHOTO[::-1])
    Image.fromarray(PHOTO[:-2:2, :-2:2]).save(make(folder / "low") / "a.png")
    write(folder / "low/b.tif", PHOTO[::-2, ::2])
    write(folder / "pairs/input/a.tif", noisy)
    write(folder / "pairs/target/a.tif", PHOTO)
    panels = [PHOTO[:150], noisy[:150], np.where(PHOTO[:150] > 120, 255, 0).astype(np.uint8)]
    write(folder / "rows/a.tif", np.concatenate(panels, axis=1))
    return folder


def make(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write(path: Path, pixels: np.ndarray) -> None:
    make(path.parent)
    tifffile.imwrite(path, pixels, tile=(32, 32), compression="zlib", photometric="rgb", bigtiff=True)


@pytest.fixture(autouse=True)
def inside(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def make_huge(monkeypatch: pytest.MonkeyPatch, limit: int = 9_000) -> None:
    """Treat images with more pixels as too large, and use small tiles."""
    for name in MODULES:
        monkeypatch.setattr(f"paceline.images.{name}.PIXEL_LIMIT", limit)
    monkeypatch.setattr("paceline.data.image_files.PIXEL_LIMIT", limit)
    monkeypatch.setattr("paceline.inference.compare_images.LARGEST_TILE_PX", 64)
    monkeypatch.setattr("paceline.inference.compare_images.HALOS_PER_TILE", 0)


def metrics(printed: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"^  (\S+) +([-\d.e+]+)%?$", printed, re.MULTILINE)}


def evaluate(*words: str) -> int:
    return run(["evaluate", *words, "--accelerator", "cpu"])


@pytest.mark.parametrize(
    "words",
    [
        ("twice.safetensors", "--data-root", "high"),
        ("twice.safetensors", "--data-root", "high", "--low-root", "low"),
        ("clean.safetensors", "--data", "pairs", "--data-root", "pairs"),
        ("stains.safetensors", "--data-root", "rows", "--set", "panels=image,stain,segmentation"),
    ],
)
def test_metrics_by_region_equal_those_of_whole_images(words: tuple[str, ...], monkeypatch, capsys) -> None:
    assert evaluate(*words) == 0
    whole = metrics(capsys.readouterr().out)
    make_huge(monkeypatch)
    assert evaluate(*words) == 0
    printed = capsys.readouterr().out
    assert "evaluated by region, in tiles of up to" in printed
    by_region = metrics(printed)
    expected = {name: value for name, value in whole.items() if "lpips" not in name}
    assert by_region == pytest.approx(expected, rel=1e-6) and len(by_region) >= 3


def test_what_cannot_be_evaluated_by_region_is_rejected_in_one_line(
    tmp_path, monkeypatch, rejected: Callable[..., str]
) -> None:
    make_huge(monkeypatch)
    cases = {
        ("clean.safetensors", "--data", "degraded", "--data-root", "high"): "above the limit",
    }
    for words, reason in cases.items():
        assert reason in rejected("evaluate", *words, "--accelerator", "cpu")
    words = ["train", "restoration", "--data", "pairs", "--data-root", "small", "--test-root", "pairs"]
    rng = np.random.default_rng(1)
    for kind in ("input", "target"):
        for number in range(2):
            write(Path(f"small/{kind}/{number}.tif"), rng.integers(0, 256, (40, 40, 3), dtype=np.uint8))
    words += ["--images", "16", "--batch-size", "2", "--crop", "32", "--loader", "workers", "--accelerator", "cpu"]
    words += ["--set", "validation=0.5", "--set", "width=2", "--out", str(tmp_path / "run")]
    assert "above the limit" in rejected(*words)


def test_only_evaluate_accepts_huge_test_images(tmp_path, monkeypatch) -> None:
    make_huge(monkeypatch)
    for name, side in (("small", 40), ("huge", 120)):
        for kind in ("input", "target"):
            Image.fromarray(PHOTO[:side, :side]).save(make(tmp_path / kind) / f"{name}.png")
    settings = Pairs.Settings(data_root=str(tmp_path), test_root=str(tmp_path), bad_images="skip", workers=0)
    left_out = Pairs("test", settings)
    assert len(left_out) == 1 and "left out 1 of 2 samples" in left_out.notes[-1]
    assert "huge.png: unreadable image (120 × 120 pixels, above the limit" in left_out.notes[-1]
    monkeypatch.setattr("paceline.images.decode.free_host_bytes", lambda: 400_000)  # the image needs 158,400
    with accepting_huge_images():
        source = Pairs("test", settings)
    assert len(source) == 2 and source.has_huge_images, "samples do not depend on the free memory"
    with source.regions(0) as regions:
        assert regions.read(Box(3, 4, 5, 6))["image"].shape == (5, 6, 3)
    with pytest.raises(UserError, match=r"huge\.png.*free for each of 2 processes"):
        source.regions(0, num_sharing=2)


def test_a_huge_16_bit_png_keeps_its_bits(tmp_path) -> None:
    pixels = np.random.default_rng(0).integers(0, 65536, (30, 20)).astype(np.uint16)
    Image.fromarray(pixels).save(tmp_path / "deep.png")
    with open_any_image(tmp_path / "deep.png") as image:
        assert (image.format.channels, image.format.dtype) == (1, np.uint16)
        assert np.array_equal(image.read(0, Box(2, 3, 20, 10))[..., 0], pixels[2:22, 3:13])


@pytest.mark.parametrize("is_installed", [True, False])
def test_small_tiffs_that_training_cannot_read_are_rejected_as_in_training(
    is_installed: bool, tmp_path, monkeypatch, rejected: Callable[..., str]
) -> None:
    if not is_installed:  # reading by region needs this package, but small images are not read by region
        monkeypatch.setitem(__import__("sys").modules, "imagecodecs", None)
    for name in "ab":
        tifffile.imwrite(tmp_path / f"{name}.tif", PHOTO[:60, :60], photometric="rgb")
        with tifffile.TiffFile(tmp_path / f"{name}.tif", mode="r+") as file:
            file.pages.first.tags["Compression"].overwrite(34712)  # JPEG 2000
    error = rejected("evaluate", "twice.safetensors", "--data-root", tmp_path, "--accelerator", "cpu")
    assert "its pixels or compression are not supported; save the image as grey or RGB" in error
    assert "imagecodecs" not in error
