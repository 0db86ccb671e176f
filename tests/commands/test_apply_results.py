"""Where `apply` writes its results: file names, existing files and printed messages."""

from __future__ import annotations

import itertools
import re
import time
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
from paceline.core.ordered_map import num_cores
from paceline.data.file_lists import is_image, list_folder
from paceline.inference.files import ImageTask

PHOTO = photograph("astronaut")[100:140, 180:230]  # 40 rows, 50 columns


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights files for small networks."""
    folder = tmp_path_factory.mktemp("weights")
    write_random_weights(folder / "twice.safetensors", "super_resolution", ["scale=2", "num_blocks=1", "width=2"])
    write_random_weights(folder / "stains.safetensors", "translation", TRANSLATING)
    write_random_weights(folder / "broken.safetensors", "restoration", ["width=2", "depth=1"], fill=1e30)  # overflows
    return folder


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def save(*names: str) -> None:
    """Save the same photo under each name, in the format that the suffix indicates."""
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(PHOTO).save(name)


def apply(weights: Path, *words: object) -> int:
    return run(["apply", str(weights), *map(str, words), "--accelerator", "cpu"])


def names_in(folder: str) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


def test_an_existing_file_is_replaced_only_with_overwrite(weights, capsys):
    save("vacation/1.jpg", "vacation/2.jpg")
    Image.new("RGB", (7, 7)).save("vacation/1.png")  # an image that is not a result
    own = Path("vacation/1.png").read_bytes()
    words = [weights / "twice.safetensors", "vacation/1.jpg", "vacation/2.jpg", "--out", "vacation"]
    assert apply(*words) == 2
    expected = "--out vacation: vacation/1.png exists; use --overwrite to replace it, or --skip-existing to keep it\n"
    assert expected in capsys.readouterr().err
    assert Path("vacation/1.png").read_bytes() == own and not Path("vacation/2.png").exists()
    assert apply(*words, "--skip-existing") == 0
    assert "1 image skipped: results already exist" in capsys.readouterr().out
    assert Path("vacation/1.png").read_bytes() == own and Path("vacation/2.png").exists()
    assert apply(*words) == 2 and "vacation/1.png and 1 more exist" in capsys.readouterr().err
    assert apply(*words, "--overwrite") == 0
    assert Path("vacation/1.png").read_bytes() != own
    assert apply(*words, "--overwrite", "--skip-existing") == 2


def test_an_input_image_is_never_overwritten(weights, capsys):
    save("a.png")
    before = Path("a.png").read_bytes()
    for more in ([], ["--overwrite"], ["--skip-existing"]):
        assert apply(weights / "twice.safetensors", "a.png", "--out", ".", *more) == 2
        assert "a.png is an input and would be overwritten" in capsys.readouterr().err
    assert Path("a.png").read_bytes() == before


def test_an_image_with_only_some_results_is_reported_and_other_images_are_processed(weights, capsys):
    save("in/a.png", "in/b.png")
    words = [weights / "stains.safetensors", "in", "--out", "out"]
    assert apply(*words) == 0
    Path("out/a-stain.png").unlink()
    Path("out/b-stain.png").unlink()
    Path("out/b-segmentation.png").unlink()
    assert apply(*words, "--skip-existing") == 1
    assert "not used: in/a.png: out/a-segmentation.png exists, but other results" in capsys.readouterr().err
    assert names_in("out") == ["a-segmentation.png", "b-segmentation.png", "b-stain.png"]


def test_longer_names_are_used_only_if_results_would_collide(weights, capsys):
    save("in/a.jpg", "in/a.png", "in/b.png", "in/b.tif", "p/x.png", "q/x.png", "q/inner/y.png")
    assert apply(weights / "twice.safetensors", "in", "p/x.png", "q", "--out", "out") == 0
    lone = ["a.jpg.png", "a.png.png", "b.png", "b.tif", "inner/y.png"]
    assert names_in("out") == [*lone, "p/x.png", "q/x.png"]
    save("1/same/x.png", "2/same/x.png")
    assert apply(weights / "twice.safetensors", "1/same", "2/same", "in/b.png", "--out", "other") == 1
    assert names_in("other") == ["b.png"]
    listed = capsys.readouterr().err.splitlines()
    reason = "another image has the same output file; process the two images with different --out folders"
    assert listed[:2] == [f"not used: {path}: {reason}" for path in ("1/same/x.png", "2/same/x.png")]


def test_every_image_format_in_a_folder_is_used_and_other_files_are_ignored(weights, capsys):
    save("in/a.avif", "in/b.jp2", "in/c.tga", "in/d.qoi", "in/e.jfif")
    Path("in/notes.txt").touch()
    Path("in/.hidden").touch()
    given_twice = Path("in").resolve() / "a.avif"
    assert apply(weights / "twice.safetensors", "in", given_twice, "--out", "in/made") == 0
    assert names_in("in/made") == ["a.png", "b.png", "c.png", "d.png", "e.png"]
    printed = capsys.readouterr().out
    assert "; 5 images on cpu" in printed and "\n1 other file ignored: notes.txt\n" in printed
    for number in range(4):
        Path(f"in/{number}.heic").touch()
    assert apply(weights / "twice.safetensors", "in", "--out", "in/made", "--overwrite") == 0
    assert "\n5 other files ignored: 0.heic, 1.heic, 2.heic and 2 more\n" in capsys.readouterr().out


def test_files_with_the_suffixes_of_bigtiff_are_tiff_files_for_every_command(weights):
    planes = np.stack([PHOTO[..., 0].astype(np.uint16) * 257] * 3)
    for name in ("a.tif", "b.btf", "c.TF8", "d.ome.btf"):
        Path("in").mkdir(exist_ok=True)
        tifffile.imwrite(Path("in") / name, planes, bigtiff=name != "a.tif", photometric="minisblack")
    assert apply(weights / "twice.safetensors", "in", "--out", "out") == 0
    assert names_in("out") == ["a.tif", "b.tif", "c.tif", "d.ome.tif"]
    first, *others = (tifffile.imread(Path("out") / name) for name in names_in("out"))
    others[-1] = np.moveaxis(others[-1], 0, -1)  # an OME-TIFF has one page per channel
    assert first.shape == (80, 100, 3) and all(np.array_equal(first, other) for other in others)
    assert len(list_folder(Path("in")).files) == len([file for file in Path("in").iterdir() if is_image(file)]) == 4


def test_writing_results_among_the_input_images_prints_a_warning(weights, capsys):
    save("in/a.jpg", "album/a.jpg")
    note = "--out album: is also an input folder, so running this command again would also process these results"
    for folder, out, is_noted in (("in", "in/made", False), ("album", "album", True)):
        assert apply(weights / "twice.safetensors", folder, "--out", out) == 0
        assert (note in capsys.readouterr().out) == is_noted


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_missing_images_and_results_that_are_not_finite_are_reported(weights, capsys):
    save("good.png")
    assert apply(weights / "twice.safetensors", "missing.png", "good.png", "none/*.png", "--out", "out") == 1
    assert capsys.readouterr().err.splitlines() == [
        "not used: missing.png: no such image or folder",
        "not used: none/*.png: no such image or folder",
        "1 of 3 images were processed; 2 could not be used",
    ]
    assert apply(weights / "broken.safetensors", "good.png", "--out", "broken") == 1
    assert "not used: good.png: the networks' output is not finite" in capsys.readouterr().err
    assert names_in("out") == ["good.png"] and names_in("broken") == []


def test_an_unsupported_tiff_is_reported_with_a_remedy(weights, capsys):
    grey = PHOTO[..., 0]
    deep = grey.astype(np.uint16)
    general, no_white = "its pixels or compression are not supported; save the image as", "no defined white level; save"
    written: dict[str, tuple[Any, dict[str, Any], str]] = {
        "colours": (PHOTO.astype(np.float32), {"photometric": "rgb"}, general),
        "grey": (grey.astype(np.float32), {}, no_white),
        "half": (grey.astype(np.float16), {}, general),
        "signed": (grey.astype(np.int16), {}, no_white),
        "order": (PHOTO, {"photometric": "rgb", "bigtiff": True, "byteorder": ">"}, general),
        "alpha": (np.stack([deep, deep], -1), {"extrasamples": ["unassalpha"]}, general),
        "five": (np.stack([deep] * 5, -1), {"photometric": "minisblack", "planarconfig": "contig"}, general),
        "negative": (grey.astype(np.int8), {}, no_white),
        "planes": (
            np.stack([grey] * 4),
            {"photometric": "rgb", "extrasamples": ["assocalpha"], "planarconfig": "separate"},
            "premultiplied transparency in separate planes is not supported; save the image with interleaved",
        ),
        "unknown": (grey, {}, general),
        "twelve": (PHOTO.astype(np.uint16), {"photometric": "rgb"}, general),  # not three planes
    }
    for name, (pixels, options, _) in written.items():
        tifffile.imwrite(f"{name}.tif", pixels, **options)
    for name, tag, value in (("unknown", "Compression", 34887), ("twelve", "BitsPerSample", (12, 12, 12))):
        with tifffile.TiffFile(f"{name}.tif", mode="r+b") as file:
            file.pages.first.tags[tag].overwrite(value)
    Path("text.tif").write_text("no image")
    assert apply(weights / "twice.safetensors", "*.tif", "--out", "out") == 1
    *lines, _ = capsys.readouterr().err.splitlines()
    errors = {Path(line.removeprefix("not used: ").split(": ")[0]).stem: line for line in lines}
    for name, (_, _, reason) in written.items():
        assert reason in errors[name]
    assert "not an image in a supported format" in errors["text"]
    assert not Path("out").exists() or names_in("out") == []


@pytest.mark.parametrize("out", [".", "../here", ".."])
def test_the_output_folder_may_be_the_current_folder_or_contain_the_images(weights, capsys, monkeypatch, out):
    Path("here").mkdir()
    save("in/a.png")
    for number in range(4):
        Path(f"in/{number}.png").touch()
    monkeypatch.chdir("here")
    assert apply(weights / "twice.safetensors", "../in", "--out", out) == 1
    printed = capsys.readouterr().out
    listed = Path(printed.splitlines()[-1].removeprefix("all 4 unused files are listed in "))
    assert listed.name.endswith(".not_used.txt") and len(listed.read_text().splitlines()) == 4
    assert Path(out, "a.png").is_file()


def test_a_folder_for_results_that_cannot_be_used_is_reported_before_work_starts(weights, rejected):
    save("a.png")
    for image, out, line in (
        ("a.png", "a.png/out", "--out a.png/out: cannot write to this folder: Not a directory"),
        ("a.png", "", "--out: the name of the folder"),
        ("", "out", "an empty argument is not"),
    ):
        assert line in rejected("apply", weights / "twice.safetensors", image, "--out", out)


def test_progress_counts_the_pixels_of_all_images(weights, capsys, monkeypatch):
    save("good.png")
    monkeypatch.setenv("PACELINE_ACTIVITY", "1")
    monkeypatch.setattr("paceline.core.terminal.FIRST_SECONDS", -1.0)
    assert apply(weights / "twice.safetensors", "good.png", "--out", "out", "--tile", "25") == 0
    assert re.search(r"applying: \d+% of 0\.002 megapixels, \S+ megapixels/s", capsys.readouterr().err)


def apply_with_a_hold(words: list[str]) -> int:
    """Run a command that opens 30 images and waits while there is a file `hold` before it opens the next one."""
    from paceline.inference.apply import Applier

    opened, numbers = Applier.open, itertools.count()

    def held(applier: Applier, task: ImageTask) -> Any:
        if next(numbers) >= 30:
            while Path("hold").exists():
                time.sleep(0.01)
        return opened(applier, task)

    Applier.open = held  # type: ignore[method-assign]
    return run(words)


def test_an_interrupted_command_prints_how_many_images_are_done_and_can_resume(weights, tmp_path):
    save(*(f"in/{number:03}.png" for number in range(60)))
    words = ["apply", str(weights / "twice.safetensors"), "in", "--out", "out", "--accelerator", "cpu"]
    Path("hold").touch()
    (running,) = start_function_in_ranks(tmp_path, 1, apply_with_a_hold, words)
    wait_until(lambda: Path("out/001.png").exists(), running)
    running.interrupt_group()
    Path("hold").unlink()
    assert running.wait() == 130
    done = len(names_in("out"))
    printed = running.stderr.splitlines()[0]
    assert printed.endswith(" of 60 images were processed; use --skip-existing to process the rest")
    # Each thread may have written two images that are not counted yet, and one more may be about to be counted.
    assert 2 <= done < 60 and done - 1 - 2 * num_cores() <= int(printed.split()[0]) <= done
    assert run([*words, "--skip-existing"]) == 0
    assert len(names_in("out")) == 60
