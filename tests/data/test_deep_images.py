"""Sources with many channels, 16 bits or floating-point pixels: samples, batches, packing, and bad files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from paceline.config.resolve import settings_of
from paceline.config.settings import RunSettings
from paceline.contracts.data_spec import DataSpec
from paceline.core.errors import UserError
from paceline.core.registry import load_class
from paceline.data.loader import BatchPipeline
from paceline.data.loaders.resident import Resident
from paceline.data.loaders.workers import Workers
from paceline.data.packing import MANIFEST
from paceline.data.source import ArraySource, Source, check_sample
from paceline.data.stream import Augment, Stream, transform
from paceline.runs.weights import from_json, to_json

CPU = torch.device("cpu")
CHANNELS = 5


def stack(seed: int, height: int = 24, width: int = 20, channels: int = CHANNELS) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 65536, (channels, height, width), dtype=np.uint16)


def write_stack(file: Path, planes: np.ndarray) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    tifffile.imwrite(file, planes, photometric="minisblack")


def as_float(planes: np.ndarray) -> np.ndarray:
    return (planes / np.float32(65535)).astype(np.float32)


def open_source(name: str, root: Path, split: str = "train", **settings: Any) -> Source:
    given = settings_of(name)(data=name, data_root=str(root), workers=0, **settings)  # type: ignore[arg-type]
    return load_class("source", name, Source)(split, given)  # type: ignore[call-arg, unused-ignore]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the same 5-channel 16-bit stacks in the layouts of several sources."""
    base = tmp_path_factory.mktemp("stacks")
    for split, count in (("train", 6), ("test", 2)):
        for number in range(count):
            planes = stack(number)
            write_stack(base / "photos" / split / f"{number}.tif", planes)
            write_stack(base / "classes" / split / "ab"[number % 2] / f"{number}.tif", planes)
            write_stack(base / "pairs" / split / "input" / f"{number}.tif", planes)
            write_stack(base / "pairs" / split / "target" / f"{number}.tif", planes[::-1])
            write_stack(base / "panels" / split / f"{number}.tif", np.concatenate([planes[:, :20], planes[:, 4:]], 2))
    images = np.stack([np.moveaxis(stack(number), 0, -1) for number in range(6)])
    labels = np.arange(6) % 2
    np.savez(base / "own.npz", x_train=images, y_train=labels, x_test=images[:2], y_test=labels[:2])
    return base


EXPECTED = np.moveaxis(stack(0), 0, -1)


@pytest.mark.parametrize(
    ("name", "folder", "expected"),
    [
        ("photos", "photos", {"image": EXPECTED}),
        ("pairs", "pairs", {"image": EXPECTED, "target": EXPECTED[..., ::-1]}),
        ("panels", "panels", {"image": EXPECTED[:20], "target": EXPECTED[4:]}),
        ("folder", "classes", {"image": EXPECTED[2:22]}),  # the central square
        ("npz", "own.npz", {"image": EXPECTED}),
    ],
)
def test_sources_return_every_channel_in_16_bits(name: str, folder: str, expected: dict[str, Any], root: Path) -> None:
    source = open_source(name, root / folder)
    assert (source.spec.channels, source.spec.dtype, source.spec.value_range) == (CHANNELS, "uint16", None)
    sample = source.read(0)
    for field, pixels in expected.items():
        assert sample[field].dtype == np.uint16 and np.array_equal(sample[field], pixels)
    check_sample(source, name)
    assert from_json(to_json(source.spec)) == source.spec


def batches_of(source: Source, loader: type[Resident | Workers], augment: Augment | None, crop: int) -> list[Any]:
    stream = Stream(0, len(source))
    requests = [stream.take(start, start + 3) for start in range(0, 12, 3)]
    pipeline = BatchPipeline(loader(source, CPU, RunSettings(workers=0), crop), augment, torch.float64)
    return list(pipeline.batches(requests))


def equal(some: list[Any], others: list[Any]) -> bool:
    return all(
        torch.equal(one[field], other[field]) for one, other in zip(some, others, strict=True) for field in other
    )


@pytest.mark.parametrize("pixels", ["uint8", "uint16", "float32"])
def test_all_loaders_and_packed_folders_give_equal_batches(pixels: str, root: Path, tmp_path: Path) -> None:
    from paceline.commands.pack import pack

    asked = {"pixels": pixels} | ({"value_range": "0,65535"} if pixels == "float32" else {})
    source = open_source("pairs", root / "pairs", crop=16, **asked)
    assert (source.spec.dtype, source.spec.channels) == (pixels, CHANNELS)
    expected = batches_of(source, Resident, Augment(flip=True, rot90=True), 16)
    assert expected[0]["image"].shape == (3, CHANNELS, 16, 16)
    assert equal(batches_of(source, Workers, Augment(flip=True, rot90=True), 16), expected)
    pack(str(root / "pairs"), str(tmp_path / "packed"), {"data": "pairs", "workers": 0}, asked)
    assert (tmp_path / "packed" / MANIFEST).is_file()
    packed = open_source("packed", tmp_path / "packed", crop=16)
    assert packed.spec == source.spec
    for loader in (Resident, Workers):
        assert equal(batches_of(packed, loader, Augment(flip=True, rot90=True), 16), expected)


def test_shards_store_and_return_every_channel(root: Path, tmp_path: Path) -> None:
    from paceline.data.packing import write_shards

    for name, decoded in (("files", False), ("arrays", True)):
        (tmp_path / name).mkdir()
        for split in ("train", "test"):
            source = open_source("pairs", root / "pairs", split)
            list(write_shards(source, tmp_path / name, split, 10**9, decoded, lambda _: None))
        shards = open_source("shards", tmp_path / name, crop=16)
        pairs = open_source("pairs", root / "pairs", crop=16)
        assert shards.spec == pairs.spec
        for index in range(len(pairs)):
            assert all(np.array_equal(shards.read(index)[field], value) for field, value in pairs.read(index).items())


@pytest.mark.parametrize(("dtype", "limits"), [("uint16", None), ("uint16", (0.0, 4095.0)), ("float32", (-1.0, 3.0))])
def test_batches_map_the_range_to_minus_one_and_one(dtype: Any, limits: tuple[float, float] | None) -> None:
    spec = DataSpec(1, 1, 3, dtype=dtype, value_range=limits)
    low, high = limits or (0.0, 65535.0)
    pixels = np.array([low, (low + high) // 2, high]).astype(dtype).reshape(1, 1, 3, 1)
    raw = {"image": torch.from_numpy(pixels).permute(0, 3, 1, 2), "uniforms": torch.zeros(1, 16)}
    exact = (pixels.astype(np.float64) - low) / (high - low) * 2 - 1
    for kind, tolerance in ((torch.float64, 1e-15), (torch.float32, 1e-7)):
        batch = transform(dict(raw), None, kind, spec.pixel_format)["image"]
        assert batch.dtype == kind and np.abs(batch.numpy().ravel() - exact.ravel()).max() <= tolerance
        assert batch.flatten()[[0, 2]].tolist() == [-1, 1]


def test_padding_is_black_in_every_pixel_format() -> None:
    spec = DataSpec(2, 4, 4, dtype="uint16")
    source = ArraySource({"image": np.full((6, 4, 4, 2), 65535, np.uint16)}, spec)
    for batch in batches_of(source, Resident, Augment(pad_crop=2), 0):
        assert set(batch["image"].unique().tolist()) <= {-1.0, 1.0}


def test_16_bit_grey_images_stay_16_bit_on_request_and_otherwise_cause_a_note(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        Image.fromarray(stack(0)[0]).save(tmp_path / split / "a.png")
    source = open_source("photos", tmp_path)
    assert (source.spec.dtype, source.spec.channels) == ("uint8", 3)
    assert "16-bit images are read as 8-bit; use --set pixels=uint16" in " ".join(source.notes)
    source = open_source("photos", tmp_path, pixels="uint16")
    assert (source.spec.dtype, source.spec.channels, source.notes) == ("uint16", 1, ())
    assert np.array_equal(source.read(0)["image"][..., 0], stack(0)[0])
    assert open_source("photos", tmp_path, pixels="uint16", channels=3).read(0)["image"].shape == (24, 20, 3)


def test_a_declared_range_of_integers_is_used_and_checked(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_stack(tmp_path / split / "a.tif", stack(0) >> 4)
    source = open_source("photos", tmp_path, value_range="0,4095")
    assert (source.spec.dtype, source.spec.value_range) == ("uint16", (0.0, 4095.0))
    assert source.read(0)["image"].max() <= 4095
    with pytest.raises(UserError, match=r"a\.tif.*exceed value_range=0,100"):
        open_source("photos", tmp_path, value_range="0,100").read(0)


def test_floating_point_images_need_a_range_which_is_suggested(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_stack(tmp_path / split / "a.tif", as_float(stack(0)) * 300)
    with pytest.raises(UserError, match=r"a\.tif: floating-point pixels need .* --set value_range=0,1000"):
        open_source("photos", tmp_path)
    source = open_source("photos", tmp_path, value_range="0,1000")
    assert (source.spec.dtype, source.spec.value_range) == ("float32", (0.0, 1000.0))
    assert np.array_equal(source.read(0)["image"], np.moveaxis(as_float(stack(0)) * 300, 0, -1))
    assert from_json(to_json(source.spec)) == source.spec


def test_the_suggested_range_fits_common_formats(tmp_path: Path) -> None:
    for high, suggested in ((0.9, "0,1"), (5, "0,10"), (300, "0,1000")):
        for split in ("train", "test"):
            write_stack(tmp_path / split / "a.tif", np.linspace(0, high, 320, dtype=np.float32).reshape(5, 8, 8))
        with pytest.raises(UserError, match=rf"--set value_range={suggested}$"):
            open_source("photos", tmp_path)


def test_a_value_that_is_not_finite_is_reported_with_its_file(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_stack(tmp_path / split / "a.tif", as_float(stack(0)))
    for value in (np.nan, np.inf):
        broken = as_float(stack(1))
        broken[2, 3, 4] = value
        write_stack(tmp_path / "train" / "b.tif", broken)
        with pytest.raises(UserError, match=r"b\.tif.*NaN or infinite"):
            open_source("photos", tmp_path, value_range="0,1").read(1)
    skipped = open_source("photos", tmp_path, value_range="0,1", bad_images="skip")
    assert len(skipped) == 1 and "b.tif" in " ".join(skipped.notes)


def test_files_that_do_not_fit_the_first_are_reported_by_name(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_stack(tmp_path / split / "a.tif", stack(0))
    write_stack(tmp_path / "train" / "b.tif", stack(1, channels=4))
    with pytest.raises(UserError, match=r"b\.tif: unreadable image \(4 channels instead of 5"):
        open_source("photos", tmp_path)
    write_stack(tmp_path / "train" / "b.tif", stack(1))
    content = (tmp_path / "train" / "b.tif").read_bytes()
    (tmp_path / "train" / "b.tif").write_bytes(content[: len(content) * 2 // 3])
    with pytest.raises(UserError, match=r"b\.tif: unreadable image"):
        open_source("photos", tmp_path)
    assert len(open_source("photos", tmp_path, bad_images="skip")) == 1
    with pytest.raises(UserError, match=r"channels=7: .*a\.tif has 5 channels"):
        open_source("photos", tmp_path, channels=7)


@pytest.mark.parametrize(
    ("channels", "dtype", "problem"), [(65, np.uint8, "65 channels"), (5, np.int32, "int32 pixels")]
)
def test_stacks_that_cannot_be_used_are_not_read_as_single_pages(
    channels: int, dtype: Any, problem: str, tmp_path: Path
) -> None:
    for split in ("train", "test"):
        write_stack(tmp_path / split / "a.tif", stack(0, channels=channels).astype(dtype))
    with pytest.raises(UserError, match=rf"a\.tif: {problem}"):
        open_source("photos", tmp_path)


def test_an_invalid_range_is_rejected(root: Path) -> None:
    for text in ("1", "1,0", "0,nan", "a,b", "0,1,2"):
        with pytest.raises(UserError, match=f"value_range={text}: must be two numbers"):
            open_source("photos", root / "photos", value_range=text)


def test_degraded_stacks_have_noise_in_every_channel_relative_to_the_range(root: Path) -> None:
    source = open_source("degraded", root / "photos", degrade_noise=10.0)
    sample = source.read(0)
    assert sample["image"].dtype == np.uint16 and np.array_equal(sample["target"], EXPECTED)
    inside = (EXPECTED > 15000) & (EXPECTED < 50000)
    error = (sample["image"].astype(np.float64) - EXPECTED)[inside]
    assert error.std() == pytest.approx(10 * 65535 / 255, rel=0.05)
    assert np.array_equal(source.read(0)["image"], sample["image"])
    blurred = open_source("degraded", root / "photos", degrade_noise=0.0, degrade_blur=2.0).read(0)
    assert blurred["image"].std() < 0.5 * EXPECTED.std()
    with pytest.raises(UserError, match=r"degrade_jpeg=50: JPEG files have 8 bits"):
        open_source("degraded", root / "photos", degrade_jpeg=50)


def test_npz_arrays_of_floats_need_a_range(tmp_path: Path) -> None:
    images, labels = np.random.default_rng(0).random((4, 6, 6, 7)), np.arange(4)
    np.savez(tmp_path / "a.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    source = open_source("npz", tmp_path / "a.npz", value_range="0,1", size=3)
    assert (source.spec.channels, source.spec.dtype, source.spec.height) == (7, "float32", 3)
    with pytest.raises(UserError, match=r"x_train: its values from 0\.\d+ to 0\.\d+ exceed value_range=0,0\.5"):
        open_source("npz", tmp_path / "a.npz", value_range="0,0.5")


def test_old_data_specs_are_8_bit_and_damaged_ones_are_rejected() -> None:
    old = '{"channels": 3, "height": 4, "width": 4, "num_classes": 0, "class_names": [], "flip_allowed": true, '
    old += '"scale": 0, "panels": []'
    assert from_json(old + "}") == DataSpec(3, 4, 4)
    for damage in ('"dtype": "int64"', '"dtype": "float32"', '"value_range": [1, 0]', '"value_range": ["a", 1]'):
        with pytest.raises((ValueError, TypeError)):
            from_json(f"{old}, {damage}}}")
