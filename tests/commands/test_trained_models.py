"""A trained model produces the same results from Python, from the command line and as an ONNX file."""

from __future__ import annotations

import csv
import importlib
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from exporting import can_export
from photographs import photograph
from PIL import Image
from running import run_fork
from test_apply import write_random_weights

import paceline
from paceline.cli.app import run
from paceline.core.errors import UserError
from paceline.data.bundled import FOLDER
from paceline.images.grids import grid, to_image

TINY_GAN = str(Path(__file__).parent.parent / "tiny_gan.py")
CLASSES = ("nought", "one", "three", "two")  # the class folders in sorted order


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier trained on class folders, a generator, and weights for restoration."""
    folder = tmp_path_factory.mktemp("trained")
    with np.load(FOLDER / "digits.npz") as digits:
        images, labels = digits["images"][:400], digits["labels"][:400]
    for number, (pixels, label) in enumerate(zip(images, labels, strict=True)):
        if label < 4:
            name = ("nought", "one", "two", "three")[label]
            place = folder / "digits" / ("test" if number % 3 == 0 else "train") / name
            place.mkdir(parents=True, exist_ok=True)
            image = Image.fromarray((pixels * 15.9).astype(np.uint8)).resize((24, 24), Image.Resampling.NEAREST)
            image.crop((0, 0, 24, 26)).save(place / f"{number}.png")  # the image is not square
    words = ["train", "classification", "--data", "folder", "--data-root", "digits", "--set", "size=12"]
    words += ["--set", "width=4", "--set", "ema_half_life=64 images", "--images", "1024", "--batch-size", "32"]
    words += ["--set", "channels=1", "--set", "pad_crop=0", "--accelerator", "cpu", "--out"]
    trained = [run_fork(folder, *words, "classifier"), run_fork(folder, "train", TINY_GAN, "--out", "generator")]
    for one in trained:
        assert one.wait() == 0, one.stderr
    write_random_weights(folder / "restorer.safetensors", "restoration", ["width=4", "depth=2"])
    return folder


@pytest.fixture(autouse=True)
def inside(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)


def pixels(path: str | Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def predict(*words: str) -> int:
    return run(["predict", *words, "--accelerator", "cpu"])


def test_classes_with_different_names_are_rejected_instead_of_matched_by_index(tmp_path, rejected):
    shutil.copytree("digits", tmp_path / "digits")
    words = ["evaluate", "classifier", "--accelerator", "cpu", "--data-root", str(tmp_path / "digits")]
    assert run(words) == 0
    for split in ("train", "test"):
        (tmp_path / "digits" / split / "nought").rename(tmp_path / "digits" / split / "zero")
    line = rejected(*words)
    assert "--data folder: class 0 in the test split is 'one', but classifier was trained with 'nought'; use" in line


def test_predictions_for_files_have_the_accuracy_that_evaluate_measures(capsys):
    assert run(["evaluate", "classifier", "--accelerator", "cpu"]) == 0
    measured = re.search(r"top1 +([\d.]+)%\n.*\n +count +(\d+)", capsys.readouterr().out)
    assert measured and 30 < float(measured[1]) < 100, "must lie between chance and 100%, so that a difference shows"
    assert predict("classifier", "digits/test", "--top", "1", "--out", "all.csv") == 0
    with Path("all.csv").open(newline="") as file:
        right = [Path(row["file"]).parent.name == row["class_1"] for row in csv.DictReader(file)]
    assert len(right) == int(measured[2])
    assert 100 * sum(right) / len(right) == pytest.approx(float(measured[1]), abs=1e-5)


def test_predictions_can_be_read_if_a_file_name_is_not_utf_8(tmp_path):
    image = os.fsencode(tmp_path) + b"/\xff.png"
    with open(image, "wb") as file:
        Image.new("L", (12, 12)).save(file, "PNG")
    assert predict("classifier", str(tmp_path), "--out", str(tmp_path / "odd.csv")) == 0
    assert image + b"," in (tmp_path / "odd.csv").read_bytes()


def test_a_loaded_classifier_accepts_images_and_tensors_and_changes_no_global_state():
    torch.set_float32_matmul_precision("medium")
    model = paceline.load(Path("classifier"), device="cpu")
    assert model.classes == CLASSES and (model.spec.channels, model.spec.height) == (1, 12)
    files = sorted(Path("digits/test").rglob("*.png"))[::7]
    opened = [Image.open(file).convert("RGBA") for file in files]  # fully opaque, so the grey values stay the same
    assert opened[0].width != opened[0].height
    as_source = [image.convert("L").resize((12, 12), Image.Resampling.BICUBIC, (0, 1, 24, 25)) for image in opened]
    tensor = torch.from_numpy(np.stack([np.asarray(one) for one in as_source]))[:, None]
    found = model.predict(opened)
    assert found.shape == (len(files), 4) and torch.allclose(found.sum(1), torch.ones(len(files)).double())
    assert torch.equal(found, model.predict(tensor)) and torch.equal(found, model.predict(tensor.numpy()))
    assert torch.equal(model.predict(opened[0]), model.predict(opened[:1])), "a single image equals a list of one"
    assert torch.equal(model.predict(tensor.numpy()[::-1]), model.predict(tensor.flip(0)))
    assert model.predict([]).shape == (0, 4)
    assert not any(network.training for network in model.networks.values())
    assert torch.get_float32_matmul_precision() == "medium"
    torch.set_float32_matmul_precision("highest")


def test_a_loaded_classifier_uses_the_same_ema_weights_as_evaluation():
    weights = paceline.load("classifier", checkpoint=1024).networks["classifier"].state_dict()
    path = next(Path("classifier/checkpoints").glob("*1024/weights.safetensors"))
    kept = importlib.import_module("safetensors.torch").load_file(path)
    name = next(name for name in kept if name.startswith("ema/"))
    plain = name.removeprefix("ema/")
    own = weights[plain.removeprefix("classifier.")]
    assert torch.equal(own, kept[name]) and not torch.equal(own, kept[plain])


def test_images_that_a_model_does_not_accept_are_reported():
    model, expected = paceline.load("classifier", device="cpu"), "uint8 [n, 1, 12, 12]"
    restorer = paceline.load("restorer.safetensors", device="cpu")
    for use, images, line in (
        (model.predict, torch.zeros(2, 1, 12, 12), f"expected images as {expected}, not torch.float32 [2, 1, 12, 12]"),
        (model.predict, torch.zeros(2, 3, 12, 12, dtype=torch.uint8), "not torch.uint8 [2, 3, 12, 12]"),
        (model.predict, np.zeros((1, 1, 12, 12), object), f"expected images as {expected}, not object [1, 1, 12, 12]"),
        (model.predict, [Image.new("F", (9, 9))], "an image cannot be used: signed or 32-bit pixels"),
        (model.predict, "one.png", f"expected a list of Pillow images or {expected}, not str"),
        (model.predict, ["one.png"], f"expected a list of Pillow images or {expected}, not str in a list"),
        (model.predict, 7, "not int"),
        (restorer.apply, np.zeros((8, 8, 3), np.uint8), "not ndarray; convert it with Image.fromarray"),
        (restorer.apply, Image.new("RGB", (0, 5)), "it has no pixels (0×5)"),
        (restorer.apply, "one.png", "expected a Pillow image, not str; open files with Image.open(FILE)"),
    ):
        with pytest.raises(UserError) as raised:
            use(images)
        assert line in str(raised.value)


def test_predict_reports_an_unusable_file_and_processes_the_others(tmp_path, capsys):
    good = next(Path("digits/test/one").iterdir())
    Image.open(good).save(tmp_path / "good.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    (tmp_path / "notes.txt").write_text("left alone")
    table = tmp_path / "made" / "table.csv"
    Path("digits").rename("moved")  # the training data is not needed
    assert predict("classifier", str(tmp_path), "nowhere.png", "--top", "9", "--out", str(table)) == 1
    Path("moved").rename("digits")
    printed = capsys.readouterr()
    assert f"not used: {tmp_path}/broken.png: not an image in a supported format" in printed.err
    assert "not used: nowhere.png: no such image or folder" in printed.err
    assert "1 of 3 images were processed; 2 could not be used" in printed.err
    prediction = next(line for line in printed.out.splitlines() if line.startswith(f"{tmp_path}/good.png: "))
    assert len(re.findall(r"\w+ \(\d+\.\d%\)", prediction)) == 4, "all classes, since there are fewer than requested"
    (row,) = csv.DictReader(table.open())
    probabilities = [float(row[f"probability_{n}"]) for n in range(1, 5)]
    assert probabilities == sorted(probabilities, reverse=True) and sum(probabilities) == pytest.approx(1)
    assert sorted(row[f"class_{n}"] for n in range(1, 5)) == list(CLASSES)
    assert f"{row['class_1']} ({probabilities[0]:.1%})" in prediction
    assert sorted(path.name for path in table.parent.iterdir()) == ["table.csv"]


def test_existing_results_are_replaced_only_with_overwrite(rejected):
    for file, command in {"there.csv": ("predict", "digits/test/one"), "there.onnx": ("export",)}.items():
        Path(file).write_text("mine")
        line = rejected(command[0], "classifier", *command[1:], "--out", file)
        assert f"--out {file}: the file exists; use --overwrite to replace it" in line
        assert Path(file).read_text() == "mine"
    assert predict("classifier", "digits/test/one", "--out", "there.csv", "--overwrite") == 0
    assert Path("there.csv").read_text().startswith("file,class_1,probability_1")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--top", "0"], "Invalid value for '--top'"),
        (["--out", "table.txt"], "--out table.txt: expected a file name ending in .csv"),
        (["--checkpoint", "7"], "--checkpoint 7: no checkpoint was kept at this number of images"),
    ],
)
def test_invalid_predict_options_are_reported(words, line, rejected):
    assert line in rejected("predict", "classifier", "digits/test", "--accelerator", "cpu", *words)


@pytest.mark.parametrize(
    ("command", "of", "other"),
    [
        ("predict", "generator", "sample"),
        ("predict", "restorer.safetensors", "apply"),
        ("apply", "generator", "sample"),
        ("apply", "classifier", "predict"),
    ],
)
def test_a_command_that_does_not_support_a_recipe_names_the_command_that_does(command, of, other, tmp_path, rejected):
    line = rejected(command, of, "digits/test", "--trust", "--out", tmp_path / "x.csv")
    assert f"which `{command}` does not do: use `{other}`" in line
    with pytest.raises(UserError, match=f"`{command}` does not do: use `{other}`"):
        getattr(paceline.load(of, device="cpu"), command)(None)


def test_a_loaded_generator_generates_the_same_images_as_sample():
    assert run(["sample", "generator", "--trust", "--accelerator", "cpu", "--grid", "3x5", "--out", "grid.png"]) == 0
    model = paceline.load("generator", device="cpu")
    made = model.sample(15)
    assert made.shape == (15, 1, 8, 8) and made.dtype == torch.uint8
    assert np.array_equal(pixels("grid.png"), to_image(grid(made.permute(0, 2, 3, 1).numpy(), 5)))
    assert torch.equal(made[:4], model.sample(4)) and torch.equal(made, model.sample(15, seed=0))
    assert not torch.equal(made, model.sample(15, seed=1))
    assert list(model.networks) == ["generator", "discriminator"] and not model.networks["generator"].training


def test_a_loaded_restorer_returns_the_same_image_as_apply(tmp_path):
    photo = photograph("astronaut")[100:141, 180:233]
    for name, one in (("colour", photo), ("grey", photo[..., 0])):
        Image.fromarray(one).save(tmp_path / f"{name}.png")
    words = ["apply", "restorer.safetensors", str(tmp_path), "--accelerator", "cpu", "--out", str(tmp_path / "made")]
    assert run(words) == 0
    torch.use_deterministic_algorithms(False)  # commands enable this mode, but a user's program may not
    model = paceline.load("restorer.safetensors", device="cpu")
    for name in ("colour", "grey"):
        made = model.apply(Image.open(tmp_path / f"{name}.png"))
        assert list(made) == ["image"] and np.array_equal(made["image"], pixels(tmp_path / "made" / f"{name}.png"))
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_unavailable_device_is_reported():
    for wrong in ("gpu", "cuda:99"):
        with pytest.raises(UserError, match=f"device='{wrong}': expected 'cpu', 'cuda' or a GPU index"):
            paceline.load("classifier", device=wrong)


def test_predict_rejects_a_recipe_that_it_does_not_support(tmp_path, capsys):
    (tmp_path / "mute.py").write_text(
        "from torch import nn\nfrom paceline.contracts.recipe import Loss, Phase, Recipe\n\n\nclass Mute(Recipe):\n"
        "    defaults = {'data': 'digits', 'size': 8}\n    phases = (Phase('net', 'net'),)\n\n"
        "    def __init__(self, settings, spec):\n        super().__init__(settings, spec)\n"
        "        self.net = nn.Conv2d(1, 1, 1)\n\n"
        "    def net_loss(self, batch):\n        return Loss({'size': self.net(batch['image']).square().mean()})\n"
    )
    words = ["train", str(tmp_path / "mute.py"), "--images", "32", "--accelerator", "cpu", "--out", "mute"]
    trained = run_fork(Path.cwd(), *words)
    assert trained.wait() == 0, trained.stderr
    assert predict("mute", "digits/test", "--trust") == 2
    assert "`predict` does not support recipe" in capsys.readouterr().err
    assert list(paceline.load("mute").networks) == ["net"]


@can_export
def test_an_exported_classifier_accepts_raw_images_and_stores_its_classes(tmp_path, capsys):
    import onnxruntime

    file = str(tmp_path / "model.onnx")
    assert run(["export", "classifier", "--out", file]) == 0
    printed = capsys.readouterr().out
    assert "input `images` uint8 [n, 1, 12, 12] in 0…255; output probabilities [n, 4]" in printed
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    images = torch.randint(256, (5, 1, 12, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    (made,) = session.run(["probabilities"], {"images": images.numpy()})
    assert np.abs(made - paceline.load("classifier", device="cpu").predict(images).numpy()).max() < 1e-5
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == list(CLASSES)


@can_export
@pytest.mark.parametrize("size", [0, 20])
def test_a_classifier_trained_on_crops_is_exported_at_evaluation_size(size, tmp_path, capsys):
    import onnxruntime

    trained = str(tmp_path / "run")
    words = ["train", "classification", "--data", "folder", "--data-root", "digits", "--set", f"size={size}"]
    words += ["--crop", "8", "--set", "width=2", "--set", "channels=1", "--images", "32", "--accelerator", "cpu"]
    training = run_fork(Path.cwd(), *words, "--set", "pad_crop=0", "--batch-size", "32", "--out", trained)
    assert training.wait() == 0, training.stderr
    file = str(tmp_path / "model.onnx")
    assert run(["export", trained, "--out", file]) == 0
    shape = "[n, 1, 20, 20]" if size else "[n, 1, height, width]"
    assert f"input `images` uint8 {shape} in 0…255" in capsys.readouterr().out
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    model = paceline.load(trained, device="cpu")
    for px in [(20, 20)] if size else [(20, 33), (64, 8)]:
        images = np.random.default_rng(0).integers(0, 256, (3, 1, *px), np.uint8)
        (made,) = session.run(None, {"images": images})
        assert np.abs(made - model.predict(images).numpy()).max() < 1e-5
    if size:
        with pytest.raises(UserError, match=r"expected images as uint8 \[n, 1, 20, 20\], not uint8 \[1, 1, 8, 8\]"):
            model.predict(np.zeros((1, 1, 8, 8), np.uint8))
