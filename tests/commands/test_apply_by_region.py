"""`paceline apply` on TIFF files that are processed by region: the same results, bounded memory, and resume."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from photographs import photograph
from PIL import Image
from running import start_function_in_ranks, wait_until
from test_apply import TRANSLATING, write_random_weights

from paceline.cli.app import run
from paceline.images import pyramid_file
from paceline.images.pyramid_file import PyramidFile
from paceline.images.rectangles import Box
from paceline.images.regions import TiffImage, open_region_image
from paceline.inference.tiles import TileRunner

SMALLEST_LEVEL_PX = 128
PHOTO = np.tile(photograph("astronaut")[:200, :300], (2, 1, 1))  # 400 rows, 300 columns


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights files, and a tiled TIFF that tifffile wrote."""
    folder = tmp_path_factory.mktemp("regions")
    write_random_weights(folder / "twice.safetensors", "super_resolution", ["scale=2", "num_blocks=1", "width=2"])
    write_random_weights(folder / "stains.safetensors", "translation", TRANSLATING)
    write_random_weights(folder / "instance.safetensors", "translation", [*TRANSLATING, "norm=instance"])
    tifffile.imwrite(folder / "slide.tif", PHOTO, tile=(64, 64), compression="zlib", photometric="rgb")
    Image.fromarray(PHOTO).save(folder / "photo.png")
    return folder


@pytest.fixture(autouse=True)
def inside(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(pyramid_file, "SMALLEST_LEVEL_PX", SMALLEST_LEVEL_PX)


def apply(*words: object) -> int:
    return run(["apply", *map(str, words), "--accelerator", "cpu"])


@pytest.mark.parametrize("name", ["twice", "stains"])
def test_a_region_equals_that_part_of_the_whole_result(name: str, tmp_path: Path, capsys) -> None:
    assert apply(f"{name}.safetensors", "photo.png", "--out", tmp_path / "whole") == 0
    scale = 2 if name == "twice" else 1
    tiles, one_tile = ["--tile", 64, "--devices", 2], list[Any]()  # a single tile also sees its surroundings
    for region, words in (("33,50,211,301", tiles), ("33,50,211,150", one_tile), ("0,0,299,399", one_tile)):
        left, top, width, height = (int(number) * scale for number in region.split(","))
        out = tmp_path / region
        assert apply(f"{name}.safetensors", "slide.tif", "--out", out, "--region", region, *words) == 0
        assert ("more pixels) →" in capsys.readouterr().out) == (words is tiles)
        for part in out.iterdir():
            whole = tmp_path / "whole" / part.name.replace("slide", "photo").replace(".tif", ".png")
            with tifffile.TiffFile(part) as file:
                assert file.is_bigtiff and file.pages.first.is_tiled and len(file.series[0].levels) > 1
                made = file.asarray().astype(int)
            assert np.abs(made - np.asarray(Image.open(whole))[top : top + height, left : left + width]).max() <= 1


def test_large_images_are_processed_by_region_without_a_flag(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("paceline.inference.apply_regions.PIXEL_LIMIT", 400 * 300 - 1)
    assert apply("twice.safetensors", "slide.tif", "--out", tmp_path) == 0
    with tifffile.TiffFile(tmp_path / "slide.tif") as file:
        assert file.series[0].levels[0].shape == (800, 600, 3)


def test_premultiplied_colours_are_not_processed_without_their_transparency(tmp_path: Path, capsys) -> None:
    pixels = np.concatenate([PHOTO // 2, np.full_like(PHOTO[..., :1], 128)], axis=-1)
    tifffile.imwrite(tmp_path / "a.tif", pixels, photometric="rgb", extrasamples=["assocalpha"], tile=(64, 64))
    assert apply("twice.safetensors", tmp_path / "a.tif", "--out", tmp_path / "out", "--region", "0,0,99,99") == 1
    assert "a.tif: premultiplied transparency cannot be read by region" in capsys.readouterr().err
    assert apply("twice.safetensors", tmp_path / "a.tif", "--out", tmp_path / "out") == 0


def test_results_get_their_names_only_when_all_of_them_are_complete(tmp_path: Path, monkeypatch) -> None:
    words = ["stains.safetensors", "slide.tif", "--out", tmp_path, "--region", "0,0,200,200"]
    names: list[list[str]] = []
    complete = PyramidFile.complete

    def completing(file: PyramidFile, name: str) -> None:
        complete(file, name)
        names.append([path.name for path in tmp_path.glob("*.tif")])

    monkeypatch.setattr(PyramidFile, "complete", completing)
    assert apply(*words) == 0
    assert names == [[], []] and len(list(tmp_path.iterdir())) == 2


def test_ome_tiff_is_written_on_request_and_for_ome_tiff(tmp_path: Path) -> None:
    assert apply("twice.safetensors", "slide.tif", "--out", tmp_path, "--format", "ome-tiff") == 0
    with tifffile.TiffFile(tmp_path / "slide.ome.tif") as file:
        assert file.is_ome and file.series[0].shape == (800, 600, 3)
    assert apply("twice.safetensors", tmp_path / "slide.ome.tif", "--level", 1, "--out", tmp_path / "again") == 0
    with tifffile.TiffFile(tmp_path / "again/slide.ome.tif") as file:
        assert file.is_ome and file.series[0].shape == (800, 600, 3)


def apply_to_sixty_tiles(words: list[str]) -> int:
    """Run a command that computes 60 tiles and waits until it is killed before it computes the next one."""
    compute, numbers = TileRunner.run, itertools.count()

    def held(runner: TileRunner, tiles: Any, *inner: Any) -> Any:
        while next(numbers) >= 60:
            time.sleep(0.01)
        return compute(runner, tiles, *inner)

    TileRunner.run = held  # type: ignore[method-assign]
    pyramid_file.SMALLEST_LEVEL_PX = SMALLEST_LEVEL_PX
    return run(words)


def test_a_killed_command_resumes_and_ends_with_the_same_bytes(place, tmp_path: Path, capsys, monkeypatch) -> None:
    words = ["apply", "twice.safetensors", "slide.tif", "--accelerator", "cpu", "--tile", "32"]
    words += ["--region", "0,0,300,400"]
    assert run([*words, "--out", str(tmp_path / "whole")]) == 0
    progress = tmp_path / "killed/.slide.tif.journal"
    for num_bytes in (500, 800):
        (killed,) = start_function_in_ranks(place, 1, apply_to_sixty_tiles, [*words, "--out", str(tmp_path / "killed")])
        wait_until(lambda n=num_bytes: progress.exists() and progress.stat().st_size > n, killed)
        killed.kill()
        assert killed.wait() == -signal.SIGKILL
    computed = count_tiles(monkeypatch)
    assert run([*words, "--out", str(tmp_path / "killed")]) == 0
    printed = capsys.readouterr().out
    assert "resumed after" in printed and "130 tiles of 32 pixels" in printed and 0 < len(computed) < 125
    names = sorted(path.name for path in (tmp_path / "killed").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "whole").iterdir()) and len(names) == 1
    for name in names:
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def count_tiles(patch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with every computed tile."""
    counted: list[int] = []
    original = TileRunner.run

    def counting(self: TileRunner, tiles: Any, *inner: Any) -> Any:
        counted.append(len(tiles))
        return original(self, tiles, *inner)

    patch.setattr(TileRunner, "run", counting)
    return counted


def test_background_is_skipped_and_its_mask_is_kept(tmp_path: Path, capsys) -> None:
    pixels = np.full((256, 320, 3), 245, np.uint8)
    pixels[64:128, 128:192] = PHOTO[:64, :64]
    tifffile.imwrite(tmp_path / "a.tif", pixels, tile=(64, 64), photometric="rgb")
    words = ["--skip-background", "--tile", 64]
    assert apply("twice.safetensors", tmp_path / "a.tif", "--out", tmp_path / "out", *words) == 0
    assert "19 of 20 tiles are background" in capsys.readouterr().out
    mask = np.asarray(Image.open(tmp_path / "out/a-mask.png"))
    assert mask.shape == (4, 5) and (mask > 0).sum() == 1 and mask[1, 2] == 255
    made = tifffile.imread(tmp_path / "out/a.tif")
    assert (made[:128] == made[0, 0]).all() and made[128:256, 256:384].std() > 3


def test_a_full_disk_leaves_no_result_and_the_command_resumes(tmp_path: Path, monkeypatch, capsys) -> None:
    written = []
    write = pyramid_file._write_at

    def fill(file: int, content: bytes, offset: int) -> None:
        written.append(len(content))
        if len(written) > 5:
            os.pwrite(file, content[:100], offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, content, offset)

    words = ["twice.safetensors", "slide.tif", "--out", tmp_path, "--tile", 64, "--region", "0,0,300,400"]
    monkeypatch.setattr(pyramid_file, "_write_at", fill)
    assert apply(*words) == 2
    assert "No space left on device; run the same command again" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.tif"))
    monkeypatch.setattr(pyramid_file, "_write_at", write)
    assert apply(*words) == 0
    assert "resumed after 5 of 35 tiles" in capsys.readouterr().out


def test_files_that_cannot_be_used_are_listed_and_others_are_processed(tmp_path: Path, capsys) -> None:
    content = Path("slide.tif").read_bytes()
    with TiffImage(Path("slide.tif")) as image:
        offset = image._pages[0][0].dataoffsets[3]
    (tmp_path / "damaged.tif").write_bytes(content[: offset + 20] + b"????" + content[offset + 24 :])
    (tmp_path / "good.tif").write_bytes(content)
    Image.fromarray(PHOTO).save(tmp_path / "photo.png")
    words = ["--region", "0,0,300,400", "--tile", 64]
    assert apply("twice.safetensors", tmp_path, "--out", tmp_path / "out", *words) == 1
    printed = capsys.readouterr().err
    assert "damaged.tif: damaged: tile 3 cannot be decoded" in printed
    assert "photo.png: --region: only for TIFF files and whole slides" in printed
    assert [path.name for path in (tmp_path / "out").glob("*.tif")] == ["good.tif"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--region", "200,0,101,50"], "--region 200,0,101,50: is outside the image, which has 300×400 pixels"),
        (["--level", "1"], "--level 1: the image has no such level; the last one is 0"),
        (["--magnification", "20"], "--magnification 20: the file does not state its magnification"),
        (["--region", "0,0,64,64", "--format", "png"], "written as TIFF; leave --format out"),
        (["--region", "0,0,64,64", "--downsample", "bicubic"], "slide.tif: --downsample: not supported"),
        (["--region", "0,0,64,64", "--panel", 1], "slide.tif: --panel: not supported"),
    ],
)
def test_a_part_that_cannot_be_processed_is_reported(words: list[str], line: str, tmp_path: Path, capsys) -> None:
    assert apply("twice.safetensors", "slide.tif", "--out", tmp_path, *words) == 1
    assert line in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_wrong_options_print_one_line(tmp_path: Path, rejected: Callable[..., str]) -> None:
    for words in (["--region", "1,2,3"], ["--region", "0,0,0,5"], ["--level", "-1"], ["--quality", "9"]):
        rejected("apply", "twice.safetensors", "slide.tif", "--out", tmp_path, *words)


def test_a_network_without_exact_tiles_prints_a_warning(tmp_path: Path, capsys) -> None:
    assert (
        apply(
            "instance.safetensors",
            "slide.tif",
            "--out",
            tmp_path,
            "--tile",
            64,
            "--level",
            0,
            "--region",
            "0,0,300,400",
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "normalises using statistics from the whole image: seams may be visible" in printed
    assert "tiles change the centre by at most" in printed and "of 255 levels (mean" in printed
    for region, differs in (("0,0,300,400", False), ("9,9,200,200", True)):
        assert apply("instance.safetensors", "slide.tif", "--out", tmp_path / region, "--region", region) == 0
        assert ("differs from the same part of the whole result" in capsys.readouterr().out) == differs


@pytest.mark.extras
def test_a_slide_in_the_format_of_aperio_is_read_with_openslide(tmp_path: Path, capsys) -> None:
    pytest.importorskip("openslide")
    pytest.importorskip("imagecodecs")
    description = "Aperio Image Library v1\r\n300x400 [0,0 300x400] (64x64) JPEG/RGB Q=95|AppMag = 40|MPP = 0.25"
    options = {"tile": (64, 64), "photometric": "rgb", "compression": "jpeg", "metadata": None}
    with tifffile.TiffWriter(tmp_path / "a.svs") as file:
        file.write(PHOTO, description=description, **options)
        file.write(PHOTO[::4, ::4], description=description, **options)
    words = ["--magnification", 40, "--out", tmp_path / "out", "--tile", 64]
    assert apply("twice.safetensors", tmp_path / "a.svs", *words) == 0
    made = tifffile.imread(tmp_path / "out/a.tif")
    assert made.shape == (800, 600, 3)
    assert apply("twice.safetensors", tmp_path / "a.svs", "--magnification", 20, "--out", tmp_path / "no") == 1
    assert "the image has magnifications 40, 10; choose one of them" in capsys.readouterr().err


@pytest.mark.extras
def test_a_level_between_the_pixels_of_the_slide_is_read_without_interpolation(tmp_path: Path) -> None:
    pytest.importorskip("openslide")
    pytest.importorskip("imagecodecs")
    description = "Aperio Image Library v1\r\n299x399 [0,0 299x399] (64x64) JPEG/RGB Q=95|AppMag = 40|MPP = 0.25"
    options = {"tile": (64, 64), "photometric": "rgb", "compression": "jpeg", "metadata": None}
    with tifffile.TiffWriter(tmp_path / "a.svs") as file:
        file.write(PHOTO[:399, :299], description=description, **options)
        file.write(PHOTO[::8, ::8], description=description, photometric="rgb", metadata=None)  # the thumbnail
        file.write(PHOTO[:396:4, :296:4], description=description, **options)  # smaller by a factor of 4.035
    with tifffile.TiffFile(tmp_path / "a.svs") as file, open_region_image(tmp_path / "a.svs") as slide:
        stored = file.series[0].levels[1].asarray()
        assert np.array_equal(slide.read(1, Box(31, 17, 60, 50)), stored[31:91, 17:67])


def test_a_journal_of_another_command_is_ignored(tmp_path: Path, capsys) -> None:
    (tmp_path / ".slide.tif.partial").write_bytes(b"nothing")
    (tmp_path / ".slide.tif.journal").write_text(json.dumps({"image": 1, "tiling": {"side_px": 0}}) + "\n")
    assert apply("twice.safetensors", "slide.tif", "--out", tmp_path, "--tile", 64, "--region", "0,0,100,100") == 0
    assert "resumed" not in capsys.readouterr().out


def test_a_mask_is_kept_without_overwrite(tmp_path: Path, capsys) -> None:
    flag, name = "--skip-background", "a-mask.png"
    tifffile.imwrite(tmp_path / "a.tif", PHOTO[:64, :64], tile=(64, 64), photometric="rgb")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("precious")
    words = ["twice.safetensors", tmp_path / "a.tif", "--out", tmp_path / "out", flag]
    assert apply(*words) == 2
    assert f"{name} exists; use --overwrite" in capsys.readouterr().err
    assert (tmp_path / "out" / name).read_text() == "precious"
    assert apply(*words, "--overwrite") == 0
    with Image.open(tmp_path / "out" / name) as written:
        assert written.width > 0
    assert apply(*words, "--skip-existing") == 0
