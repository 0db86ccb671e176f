"""`paceline apply` with all image formats and sizes, tiles, several devices and unusable files."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from photographs import photograph
from PIL import Image
from skimage.metrics import peak_signal_noise_ratio
from torch._subclasses.fake_tensor import FakeTensor

from paceline.cli.app import run
from paceline.commands.configure import configure
from paceline.contracts.recipe import DataSpec
from paceline.images.encode import write_png
from paceline.inference.tiles import TileRunner, Tiling, choose_tiling, plan_tiles
from paceline.inference.trained import build, open_image_model
from paceline.recipes.super_resolution import SuperResolution
from paceline.runs.weights import write_weights

PHOTO = photograph("astronaut")[100:160, 180:260]  # 60 rows, 80 columns
TRANSLATING = ["generator=resnet_6", "segmentation_generator=unet_32", "ngf=1", "ndf=1", "d_layers=1"]
TINY = {
    "super_resolution": ["scale=2", "num_blocks=2", "width=4"],
    "restoration": ["width=4", "depth=2"],
    "residual": ["network=residual", "width=4", "num_blocks=2"],
    "translation": TRANSLATING,
    "instance": [*TRANSLATING, "norm=instance"],
}
RECIPES = {"residual": "restoration", "instance": "translation"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with weights files for several networks and some photographs."""
    folder = tmp_path_factory.mktemp("applying")
    for name, settings in TINY.items():
        write_random_weights(folder / f"{name}.safetensors", RECIPES.get(name, name), settings)
    (folder / "photos" / "inner").mkdir(parents=True)
    Image.fromarray(PHOTO).save(folder / "photos" / "one.png")
    Image.fromarray(PHOTO[:41, :33]).save(folder / "photos" / "inner" / "two.png")
    return folder


@pytest.fixture(autouse=True)
def inside(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def write_random_weights(path: Path, recipe: str, settings: list[str], channels: int = 3, fill: float = 0.0) -> None:
    """Write random weights that all affect the output, so that a wrong tile is detected."""
    config = configure(recipe, {}, assignments=settings, elsewhere=True)
    panels = ("stain", "segmentation") if recipe == "translation" else ()
    spec = DataSpec(channels, 32, 32, panels=panels)
    built = build(config, spec)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in built.state_dict().items():
        if fill:
            tensor.fill_(fill)
        elif tensor.dim() == 4:
            tensor.normal_(0, (1.5 / tensor[0].numel()) ** 0.5, generator=generator)
        elif "running_mean" in name:
            tensor.normal_(0, 0.1, generator=generator)
    write_weights(path, config, spec, built.state_dict())


def apply(*words: object) -> int:
    return run(["apply", *map(str, words), "--accelerator", "cpu"])


def pixels(path: Path | str) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


@pytest.mark.parametrize("name", [name for name in TINY if name != "instance"])
def test_tiled_results_equal_those_for_the_whole_image(name):
    image_model = open_image_model(f"{name}.safetensors")
    field, scale = image_model.receptive_field, image_model.output_scale
    assert not field.obstacles
    image = np.random.default_rng(0).integers(0, 256, (83, 117, 3), dtype=np.uint8)
    runner = TileRunner(image_model, torch.device("cpu"))
    found = []
    for side, uniform in ((200, False), (24, False), (24, True)):
        tiling = replace(choose_tiling(field, (83, 117), torch.device("cpu"), side=side), uniform=uniform)
        made: dict[str, np.ndarray] = {}
        tiles = plan_tiles(replace(tiling, multiple_px=field.multiple_px), (83, 117))
        assert sum(tile.own.num_pixels for tile in tiles) == 83 * 117 and (len(tiles) > 1) == (side == 24)
        for tile in tiles:
            for key, values in runner.run([(image.astype(np.uint16) * 257)[tile.area.slices]]).arrays().items():
                whole = made.setdefault(key, np.zeros((83 * scale, 117 * scale, 3), np.uint16))
                whole[tile.target(scale)] = values[0][tile.inner(scale)]
        found.append(made)
    whole, *tilings = found
    for tiled in tilings:
        assert whole.keys() == tiled.keys() and len(whole) == (2 if name == "translation" else 1)
        for key, result in whole.items():
            assert result.std() > 300
            assert np.abs(tiled[key].astype(int) - result).max() <= 1, key  # of 65,535 levels


def test_tiles_cover_the_image_and_uniform_tiles_repeat_few_shapes_and_keep_their_halo():
    assert Tiling(32, 8).spans(70) == [(0, 32, 0, 40), (32, 64, 24, 70), (64, 70, 56, 70)]
    for length, side, halo, multiple in ((1000, 64, 24, 8), (1003, 64, 24, 8), (517, 32, 40, 4), (120, 64, 16, 1)):
        found = Tiling(side, halo, uniform=True, multiple_px=multiple).spans(length)
        assert [window.start for window in found] == list(range(0, length, side)) and found[-1].stop == length
        assert len({window.halo_stop - window.halo_start for window in found}) <= 2
        for window in found:
            assert window.halo_start == 0 or window.start - window.halo_start >= halo
            assert window.halo_stop == length or window.halo_stop - window.stop >= halo
            assert window.halo_start % multiple == 0 and (
                window.halo_stop % multiple == 0 or window.halo_stop == length
            )


def test_results_keep_the_folder_structure_and_are_the_same_in_a_second_run(capsys):
    assert apply("super_resolution.safetensors", "photos", "--out", "photos/made") == 0
    first = pixels("photos/made/one.png")
    assert first.shape == (120, 160, 3) and pixels("photos/made/inner/two.png").shape == (82, 66, 3)
    assert apply("super_resolution.safetensors", "photos", "--out", "photos/made", "--tile", 16, "--overwrite") == 0
    printed = capsys.readouterr().out
    assert "2 images on cpu" in printed and "20 tiles of 16 pixels" in printed
    assert np.abs(pixels("photos/made/one.png").astype(int) - first).max() <= 1  # rounding may change a value by 1
    assert sorted(path.name for path in Path("photos/made").rglob("*.*")) == ["one.png", "two.png"]
    shutil.rmtree("photos/made")


@pytest.mark.parametrize("name", ["super_resolution", "translation", "instance"])
def test_tiny_images_do_not_keep_other_images_from_being_processed(name: str, tmp_path: Path) -> None:
    for width, height in [(1, 1), (80, 1), (33, 5)]:
        Image.fromarray(PHOTO[:height, :width]).save(tmp_path / f"{width}x{height}.png")
    Image.fromarray(PHOTO).save(tmp_path / "usual.png")
    assert apply(f"{name}.safetensors", tmp_path, "--out", tmp_path / "out") in (0, 1)
    assert list((tmp_path / "out").glob("usual*.png"))


def test_translation_writes_an_image_for_every_panel_of_every_image(tmp_path):
    assert apply("translation.safetensors", "photos/*.png", "photos/inner/two.png", "--out", tmp_path) == 0
    names = ["one-segmentation.png", "one-stain.png", "two-segmentation.png", "two-stain.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert pixels(tmp_path / "one-stain.png").shape == PHOTO.shape


def test_results_keep_the_channels_depth_and_transparency_of_their_images(tmp_path, capsys):
    grey, deep, alpha = PHOTO[..., 1], PHOTO.astype(np.uint16) * 257, np.zeros(PHOTO.shape[:2], np.uint8)
    alpha[:, 40:] = 255
    for name, image in {
        "colour.png": PHOTO,
        "grey.png": grey,
        "deep_grey.png": deep[..., 1],
        "deep_grey.tif": deep[..., 1],
        "clear.png": np.dstack([PHOTO, alpha]),
        "clear_grey.png": np.dstack([grey, alpha]),
    }.items():
        Image.fromarray(image).save(tmp_path / name)
    tifffile.imwrite(tmp_path / "deep.tif", deep, photometric="rgb")
    assert apply("super_resolution.safetensors", tmp_path, "--out", tmp_path / "out") == 0
    assert "16-bit" not in capsys.readouterr().out
    made = {path.name: pixels(path) for path in (tmp_path / "out").iterdir() if path.name != "deep.tif"}
    made["deep.tif"] = tifffile.imread(tmp_path / "out/deep.tif")
    assert {name: (image.shape[2:], image.dtype.itemsize) for name, image in made.items()} == {
        **{"colour.png": ((3,), 1), "grey.png": ((), 1), "deep_grey.png": ((), 2), "deep_grey.tif": ((), 2)},
        **{"clear.png": ((4,), 1), "clear_grey.png": ((2,), 1), "deep.tif": ((3,), 2)},
    }
    for one, other in (("deep.tif", "colour.png"), ("deep_grey.png", "grey.png")):
        assert np.abs(made[one] / 257 - made[other]).max() <= 0.51
        assert len(np.unique(made[one])) > 256  # more levels than 8 bits can represent
    assert np.array_equal(made["deep_grey.png"], made["deep_grey.tif"])
    assert (made["clear.png"][:, :72, 3] == 0).all() and (made["clear.png"][:, 88:, 3] == 255).all()
    assert np.array_equal(made["clear.png"][..., :3], made["colour.png"])
    write_png(tmp_path / "deep.png", deep)
    assert apply("super_resolution.safetensors", tmp_path / "deep.png", "--out", tmp_path / "out") == 0
    assert "16-bit colours were read as 8-bit; use RGB TIFF to keep 16 bits" in capsys.readouterr().out


def test_other_colour_modes_become_rgb_and_rotated_images_become_upright(tmp_path):
    photo = Image.fromarray(PHOTO)
    photo.convert("CMYK").save(tmp_path / "cmyk.tif")
    photo.convert("P", palette=Image.Palette.ADAPTIVE).save(tmp_path / "palette.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # EXIF orientation: rotate by 90°
    photo.save(tmp_path / "turned.png", exif=exif)
    assert apply("restoration.safetensors", tmp_path, "--out", tmp_path / "out") == 0
    assert pixels(tmp_path / "out/cmyk.tif").shape == PHOTO.shape
    assert pixels(tmp_path / "out/palette.png").shape == PHOTO.shape
    with Image.open(tmp_path / "out/turned.png") as turned:
        assert turned.size == (60, 80) and not turned.getexif()
    assert apply("restoration.safetensors", "photos/one.png", "--out", tmp_path / "plain") == 0
    Image.fromarray(np.rot90(PHOTO, -1)).save(tmp_path / "upright.png")
    assert apply("restoration.safetensors", tmp_path / "upright.png", "--out", tmp_path / "out") == 0
    assert np.array_equal(pixels(tmp_path / "out/upright.png"), pixels(tmp_path / "out/turned.png"))


def test_a_network_for_grey_images_processes_each_colour_channel(tmp_path):
    write_random_weights(tmp_path / "grey.safetensors", "super_resolution", TINY["super_resolution"], channels=1)
    Image.fromarray(PHOTO[..., 2]).save(tmp_path / "blue.png")
    assert apply(tmp_path / "grey.safetensors", "photos/one.png", tmp_path / "blue.png", "--out", tmp_path / "out") == 0
    colours, blue = pixels(tmp_path / "out/one.png"), pixels(tmp_path / "out/blue.png")
    # Rounding may differ, because the three channels are processed together.
    assert np.abs(colours[..., 2].astype(int) - blue).max() <= 1
    assert np.abs(colours[..., 0].astype(int) - blue).max() > 20


def test_unusable_files_are_listed_and_the_other_files_are_processed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("paceline.images.decode.free_host_bytes", lambda: 2 * 10**9)
    Image.fromarray(PHOTO).save(tmp_path / "good.png")
    whole = (tmp_path / "good.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.jpg").write_text("no image")
    frames = [Image.fromarray(PHOTO), Image.fromarray(PHOTO[::-1])]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    Image.new("1", (30000, 30000)).save(tmp_path / "huge.png")
    assert apply("super_resolution.safetensors", tmp_path, "--out", tmp_path / "out") == 1
    printed = capsys.readouterr()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["good.png"]
    listed = dict(line.removeprefix("not used: ").split(": ", 1) for line in printed.err.splitlines()[:-1])
    assert {Path(path).name for path in listed} == {"cut.png", "empty.png", "text.jpg", "moving.gif", "huge.png"}
    assert "PNG cannot be read by region; save the image as a tiled TIFF" in listed[str(tmp_path / "huge.png")]
    assert listed[str(tmp_path / "moving.gif")] == "animated images are not supported"
    assert printed.err.splitlines()[-1] == "1 of 6 images were processed; 5 could not be used"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nowhere", "photos", "--out", "o"], "nowhere: no such file or folder"),
        (["photos", "photos", "--out", "o"], "photos: not a run folder (it has no config.toml)"),
        (["plain.safetensors", "photos", "--out", "o"], "plain.safetensors: its metadata does not name a recipe"),
        (["damaged.safetensors", "photos", "--out", "o"], "damaged.safetensors: cannot be read"),
        (["partial.safetensors", "photos", "--out", "o"], "'generator.tail.bias' is missing"),
        (["restoration.safetensors", "nothing.png", "--out", "o"], "nothing.png: no such image or folder"),
        (["restoration.safetensors", "empty", "--out", "o"], "empty: has no images"),
        (["restoration.safetensors", "photos", "--out", "photos/one.png"], "is a file; choose a folder"),
        (["restoration.safetensors", "photos", "--out", "o", "--downsample", "bicubic"], "only for models that up"),
        (["super_resolution.safetensors", "photos", "--out", "o", "--tile", "-1"], "Invalid value for '--tile'"),
        (["super_resolution.safetensors", "photos", "--out", "o", "--devices", "0"], "--devices 0: must be at least 1"),
        (["super_resolution.safetensors", "photos"], "Missing option '--out'"),
    ],
)
def test_a_user_error_prints_one_line(words, line, rejected):
    from safetensors.torch import save_file

    Path("empty").mkdir(exist_ok=True)
    save_file({"weight": torch.zeros(1)}, "plain.safetensors")
    Path("damaged.safetensors").write_bytes(b"no weights")
    if "partial.safetensors" in words:
        image_model = open_image_model("super_resolution.safetensors")
        state = image_model.recipe.state_dict()
        del state["generator.tail.bias"]
        write_weights(Path("partial.safetensors"), image_model.config, image_model.spec, state)
    assert line in rejected("apply", *words)
    assert not Path("o").exists()


def test_networks_that_cannot_be_tiled_use_whole_images_or_print_a_warning(capsys, tmp_path):
    assert apply("instance.safetensors", "photos/one.png", "--out", tmp_path) == 0
    assert "tiles" not in capsys.readouterr().out
    assert apply("instance.safetensors", "photos/one.png", "--out", tmp_path / "tiled", "--tile", 32) == 0
    assert "normalises using statistics from the whole image: seams may be visible" in capsys.readouterr().out


def test_tiles_are_as_large_as_memory_allows(monkeypatch):
    field = open_image_model("restoration.safetensors").receptive_field
    sides = []
    for free in (2e6, 2e7, 2e9):
        monkeypatch.setattr("paceline.inference.tiles.free_bytes", lambda device, free=free: int(free))
        tiling = choose_tiling(field, (3000, 2000), torch.device("cuda"))
        assert tiling.side_px % field.multiple_px == 0 and not tiling.note
        if tiling.side_px < 3000:
            assert (tiling.side_px + 2 * tiling.halo_px) ** 2 * field.bytes_per_px * 1.5 <= free / 2
        sides.append(tiling.side_px)
    assert sides[0] < sides[1] < sides[2] == 3000
    monkeypatch.setattr("paceline.inference.tiles.free_bytes", lambda device: 10_000)
    note = choose_tiling(field, (3000, 2000), torch.device("cpu")).note
    assert "does not fit in memory: seams may be visible" in note


def no_room_on_a_gpu() -> None:
    raise torch.OutOfMemoryError("no room")


def no_room_on_the_host() -> None:
    torch.empty(10**15)


@pytest.mark.parametrize("fail", [no_room_on_a_gpu, no_room_on_the_host])
def test_tiles_become_smaller_when_a_device_runs_out_of_memory(fail, tmp_path, monkeypatch, capsys):
    assert apply("super_resolution.safetensors", "photos/one.png", "--out", tmp_path / "whole") == 0
    restore = SuperResolution.image_to_image

    def with_little_memory(self: SuperResolution, images: torch.Tensor) -> dict[str, torch.Tensor]:
        if not isinstance(images, FakeTensor) and images.shape[-1] > 70:
            fail()
        return restore(self, images)

    monkeypatch.setattr(SuperResolution, "image_to_image", with_little_memory)
    assert apply("super_resolution.safetensors", "photos/one.png", "--out", tmp_path / "tiled") == 0
    assert "4 tiles of 40 pixels" in capsys.readouterr().out
    difference = pixels(tmp_path / "tiled/one.png").astype(int) - pixels(tmp_path / "whole/one.png")
    assert np.abs(difference).max() <= 1


def test_a_downsampled_image_is_compared_with_its_original(tmp_path, capsys):
    Image.fromarray(PHOTO[:5, :3]).save(tmp_path / "tiny.png")
    words = ["super_resolution.safetensors", "photos", tmp_path / "tiny.png", "--downsample", "bicubic"]
    assert apply(*words, "--out", tmp_path / "out") == 1
    printed = capsys.readouterr()
    assert "tiny.png: 3×5 pixels; at least 16×16 are needed to downsample by 2" in printed.err
    original, bicubic = PHOTO[2:-2, 2:-2], pixels(tmp_path / "out/one-bicubic.png")[2:-2, 2:-2]
    psnr = peak_signal_noise_ratio(*(rgb_to_ycbcr_luma(image) for image in (original, bicubic)), data_range=255)
    assert f"bicubic_psnr[y] {psnr:.3f}" in printed.out
    names = {"one.png", "one-lr.png", "one-bicubic.png", "one-sr.png"}
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == names
    small = np.asarray(Image.fromarray(PHOTO).resize((40, 30), Image.Resampling.BICUBIC))
    assert np.array_equal(pixels(tmp_path / "out/one-lr.png"), small)
    assert pixels(tmp_path / "out/one-sr.png").shape == PHOTO.shape
    assert pixels(tmp_path / "out/one.png").shape[1] > 4 * PHOTO.shape[1]
    assert pixels(tmp_path / "out/inner/two-sr.png").shape == (40, 32, 3)  # cropped to an even size


def rgb_to_ycbcr_luma(image: np.ndarray) -> np.ndarray:
    return 16 + image.astype(float) @ np.array([65.481, 128.553, 24.966]) / 255


def test_several_devices_share_the_images_and_their_tiles(tmp_path, capsys):
    shutil.copytree("photos", tmp_path / "in")
    (tmp_path / "in/broken.png").write_bytes((tmp_path / "in/one.png").read_bytes()[:3000])
    words = ["--devices", 2, "--tile", 16]
    assert apply("super_resolution.safetensors", tmp_path / "in", "--out", tmp_path / "out", *words) == 1
    printed = capsys.readouterr()
    assert "3 images on 2 × cpu\n" in printed.out and "broken.png: " in printed.err
    assert apply("super_resolution.safetensors", "photos", "--out", tmp_path / "alone", "--tile", 16) == 0
    for name in ("one.png", "inner/two.png"):
        assert np.abs(pixels(tmp_path / "out" / name).astype(int) - pixels(tmp_path / "alone" / name)).max() <= 1


def test_results_are_reported_in_the_order_of_the_images(tmp_path, capsys):
    rng = np.random.default_rng(0)
    for number in range(12):
        side = 8 + 90 * (number % 3 == 0)
        Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(tmp_path / f"{number:02}.png")
    (tmp_path / "05.png").write_bytes(b"damaged")
    assert apply("super_resolution.safetensors", tmp_path, "--out", tmp_path / "out", "--devices", 2) == 1
    printed = capsys.readouterr()
    done = [Path(line.split(": ")[0]).stem for line in printed.out.splitlines() if " → " in line]
    assert done == [f"{number:02}" for number in range(12) if number != 5]
    assert "05.png" in printed.err


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_difference_of_a_lower_precision_from_fp32_is_printed_once(precision, tmp_path, capsys):
    images = ("photos/one.png", "photos/inner/two.png")
    assert apply("super_resolution.safetensors", *images, "--out", tmp_path, "--precision", precision) == 0
    (printed,) = re.findall(rf"{precision} changes this image by at most ([\d.]+) of 255", capsys.readouterr().out)
    assert apply("super_resolution.safetensors", "photos/one.png", "--out", tmp_path / "exact") == 0
    difference = np.abs(pixels(tmp_path / "one.png").astype(int) - pixels(tmp_path / "exact/one.png")).max()
    assert "levels" not in capsys.readouterr().out
    assert 0 < float(printed) < 30 and abs(difference - float(printed)) <= 1


@pytest.mark.parametrize("format_", ["png", "jpg", "webp", "tiff"])
def test_results_are_written_in_the_chosen_format(format_, tmp_path):
    assert apply("restoration.safetensors", "photos/one.png", "--out", tmp_path / "png") == 0
    assert apply("restoration.safetensors", "photos/one.png", "--out", tmp_path, "--format", format_) == 0
    (made,) = tmp_path.glob("one.*")
    assert made.suffix == {"tiff": ".tif"}.get(format_, f".{format_}")
    difference = np.abs(pixels(made).astype(int) - pixels(tmp_path / "png/one.png")).mean()
    assert difference == 0 if format_ in ("png", "tiff") else 0 < difference < 20


def test_a_failed_compilation_is_reported_once_and_the_images_are_processed(tmp_path, monkeypatch, capsys):
    forward, calls = TileRunner._forward, []

    def failing_first(self, inputs):
        calls.append(len(inputs))
        if len(calls) == 1:
            raise RuntimeError("no C compiler\nmore lines")
        return forward(self, inputs)

    monkeypatch.setattr(TileRunner, "_forward", failing_first)
    assert apply("super_resolution.safetensors", "photos", "--out", tmp_path, "--compile", "on") == 0
    printed = capsys.readouterr().out
    assert printed.count("--compile: off, because it failed (RuntimeError: no C compiler)") == 1
