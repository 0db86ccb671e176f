"""Commands accept a checkpoint's weights.safetensors in place of a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from running import run_fork
from test_apply import write_random_weights
from test_image_statistics import import_network

import paceline
from paceline.cli.app import run
from paceline.runs.tensor_files import write_tensors
from paceline.runs.weights import DATA, RECIPE, read_tensors

COUNT, SIDE = 10, 24
WEIGHTS = "run/checkpoints/000000000008/weights.safetensors"
TRAIN = ["train", "restoration", "--data", "pairs", "--data-root", "own", "--accelerator", "cpu", "--crop", "16"]
TRAIN += ["--set", "width=4", "--set", "depth=1", "--images", "8", "--batch-size", "4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run trained on ten pairs of images, and a copy of its weights file."""
    folder, random = tmp_path_factory.mktemp("weights"), np.random.default_rng(0)
    for name in ("own/input", "own/target", "other/input", "other/target"):
        (folder / name).mkdir(parents=True)
        for number in range(COUNT):
            Image.fromarray(random.integers(256, size=(SIDE, SIDE, 3), dtype=np.uint8)).save(
                folder / name / f"{number}.png"
            )
    trained = run_fork(folder, *TRAIN, "--out", "run")
    assert trained.wait() == 0, trained.stdout + trained.stderr
    shutil.copy(folder / WEIGHTS, folder / "alone.safetensors")
    return folder


@pytest.fixture(autouse=True)
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def test_a_checkpoint_and_its_weights_file_give_the_same_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for name in ("run", WEIGHTS, "alone.safetensors"):
        assert run(["evaluate", name, "--data-root", "other", "--accelerator", "cpu"]) == 0
        header, *metrics = capsys.readouterr().out.splitlines()
        assert f"restoration from {name}" in header and header.endswith(
            f"on all samples in other (pairs): {COUNT} samples"
        )
        found.append(metrics)
    assert found[0] == found[1] == found[2] and "psnr" in found[0][0]


def test_data_that_was_moved_is_split_as_in_training(capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree("own", "moved")
    printed = []
    for words in ([], ["--data-root", "moved"], ["--set", "data_root=moved", "--split", "test"]):
        assert run(["evaluate", "run", "--accelerator", "cpu", *words]) == 0
        printed.append(capsys.readouterr().out.splitlines())
    assert "on the test split of pairs: 2 samples" in printed[0][0]
    note = "moved: has the training data of run, so it is split as in training"
    assert printed[1] == printed[2] == [note, *printed[0]]
    assert run(["evaluate", "run", "--accelerator", "cpu", "--data-root", "moved", "--split", "validation"]) == 0
    assert "on the validation split of pairs: 1 sample\n" in capsys.readouterr().out


def test_checkpoint_weights_can_be_applied_to_images_and_used_to_start_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("run", "alone.safetensors"):
        assert run(["apply", name, "other/input/0.png", "--out", f"made-{name}", "--accelerator", "cpu"]) == 0
    assert Path("made-run/0.png").read_bytes() == Path("made-alone.safetensors/0.png").read_bytes()
    assert list(paceline.load("alone.safetensors", device="cpu").networks) == ["restorer"]
    started = [*TRAIN, "--lr", "0", "--init-from", "alone.safetensors", "--out", "next"]
    assert run(started) == 0
    assert "initialised from alone.safetensors: restorer" in capsys.readouterr().out
    first, second = (read_tensors(Path(name, "weights.safetensors"))[0] for name in (Path(WEIGHTS).parent, *_last()))
    assert all(torch.equal(first[key], second[key]) for key in first if not key.startswith("ema/"))


@pytest.mark.parametrize("kind", ["int", "complex", "nan", "inf"])
def test_weights_of_another_kind_or_with_values_that_are_not_finite_are_rejected(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with safetensors.safe_open("alone.safetensors", framework="pt") as opened:
        tensors, metadata = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118
    change = {
        "int": lambda tensor: tensor.int(),
        "complex": lambda tensor: tensor.to(torch.complex64),
        "nan": lambda tensor: tensor * torch.nan,
        "inf": lambda tensor: tensor + torch.inf,
    }[kind]
    changed = {name: change(value) if value.is_floating_point() else value for name, value in tensors.items()}
    safetensors.torch.save_file(changed, "bad.safetensors", metadata)
    commands = [
        ["evaluate", "bad.safetensors", "--data-root", "own"],
        ["apply", "bad.safetensors", "other/input/0.png", "--out", "bad-images", "--overwrite"],
        [*TRAIN, "--init-from", "bad.safetensors", "--out", f"bad-{kind}"],
    ]
    for command in commands:
        assert run([*command, "--accelerator", "cpu"]) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("paceline: ")]
        assert "bad.safetensors: '" in line
        assert ("NaN or infinite" if kind in ("nan", "inf") else " instead of float32; ") in line


def test_weights_of_another_precision_are_used(capsys: pytest.CaptureFixture[str]) -> None:
    with safetensors.safe_open("alone.safetensors", framework="pt") as opened:
        tensors, metadata = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.float8_e5m2):
        changed = {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}
        safetensors.torch.save_file(changed, "precise.safetensors", metadata)
        assert run(["evaluate", "precise.safetensors", "--data-root", "own", "--accelerator", "cpu"]) == 0, (
            capsys.readouterr().err
        )


def _last(name: str = "next") -> list[Path]:
    return sorted(Path(name, "checkpoints").glob("0*"))[-1:]


@pytest.mark.parametrize("devices", [("--strategy", "single"), ("--strategy", "fsdp", "--devices", "2")])
def test_a_classifier_for_other_classes_starts_with_a_new_last_layer(devices: tuple[str, ...]) -> None:
    random = np.random.default_rng(0)
    for num_classes in (2, 3):
        images, labels = random.integers(256, size=(24, 8, 8, 1), dtype=np.uint8), np.arange(24) % num_classes
        np.savez(f"{num_classes}.npz", x_train=images, y_train=labels, x_test=images[:6], y_test=labels[:6])
    name = f"classes-{devices[1]}"
    words = ["train", "classification", "--data", "npz", "--accelerator", "cpu", "--batch-size", "8", "--images", "8"]
    words += ["--set", "width=4", "--lr", "0", "--set", "validation=0"]
    first = run_fork(Path.cwd(), *words, "--data-root", "2.npz", "--out", f"{name}-2")
    assert first.wait() == 0, first.stderr
    of_three = ("--data-root", "3.npz", "--init-from", f"{name}-2")
    second = run_fork(Path.cwd(), *words, *of_three, "--out", f"{name}-3", *devices)
    assert second.wait() == 0, second.stderr
    assert "classifier (new for 3 classes: fc.bias, fc.weight)" in second.stdout
    before, after = (read_tensors(_last(f"{name}-{count}")[0] / "weights.safetensors")[0] for count in (2, 3))
    assert len(after["classifier.fc.weight"]) == 3 and after["classifier.fc.weight"].abs().sum() > 0
    kept = [key for key in before if not key.startswith("classifier.fc.")]
    assert all(torch.equal(before[key], after[key]) for key in kept if key.endswith("weight"))
    narrow = run_fork(Path.cwd(), *words, "--set", "width=3", *of_three)
    assert narrow.wait() == 2 and "trained with width=4 (not 3)" in narrow.stderr


def test_sample_accepts_a_generators_weights_file_and_rejects_unsupported_options(rejected: Callable[..., str]) -> None:
    write_random_weights(Path("gan.safetensors"), "dcgan", ["ngf=2", "ndf=2"])
    assert run(["sample", "gan.safetensors", "--grid", "1x2", "--out", "grid.png", "--accelerator", "cpu"]) == 0
    with Image.open("grid.png") as grid:
        assert grid.width > grid.height
    for words, line in (
        (["gan.safetensors"], "--out: missing; gan.safetensors is a weights file: use --out FILE"),
        (["gan.safetensors", "--animate", "--out", "a.gif"], "gan.safetensors is a weights file: use its run folder"),
        (["alone.safetensors", "--out", "a.png"], "use the run folder, or `paceline apply`"),
    ):
        assert line in rejected("sample", *words)


def test_commands_that_cannot_use_a_weights_file_say_why_and_what_to_do(rejected: Callable[..., str]) -> None:
    name, image = "alone.safetensors", "other/input/0.png"
    not_a_recipe = f"{name}: a weights file, not a recipe; to start from its weights, use RECIPE --init-from {name}"
    has_no_metrics = f"{name}: a weights file has no metrics to compare; use its run folder, or `paceline evaluate`"
    not_images = f"{name}: a weights file, not images; run `paceline apply` first, or use `paceline evaluate`"
    no_checkpoints = f"--checkpoint last: {name} is a weights file, which has no checkpoints; use its run folder"
    needs_no_import = (
        f"{name}: is a weights file of Paceline (recipe restoration), which needs no import; use it as it is"
    )
    for words, line in {
        ("import", name, "--out", "never.safetensors"): f"{needs_no_import}, e.g. --init-from {name}",
        ("import", name, "--recipe", "super_resolution", "--out", "never.safetensors"): needs_no_import,
        ("import", "run", "--out", "never.safetensors"): "run: is a run folder, which needs no import",
        ("compare", name): has_no_metrics,
        ("compare", "run", name): has_no_metrics,
        ("train", name): not_a_recipe,
        ("train", f"./{name}"): f"./{name}: a weights file, not a recipe",
        ("verify", name): not_a_recipe,
        ("plan", name): not_a_recipe,
        ("settings", name): not_a_recipe,
        ("board", name): f"{name}: not a folder: pass the folder that contains your runs",
        ("measure", name, image): not_images,
        ("measure", image, name): not_images,
        ("measure", image, "code.txt"): f"{image}: its target code.txt cannot be used: not an image",
        ("train", "restoration", "--config", name): f"--config {name}: not a TOML or INI file",
        ("evaluate", name, "--checkpoint", "last"): no_checkpoints,
        ("apply", name, image, "--checkpoint", "last", "--out", "never"): no_checkpoints,
        ("export", name, "--checkpoint", "last", "--out", "never.onnx"): "weights file, which has no checkpoints",
        ("sample", name, "--checkpoint", "last", "--out", "never.png"): no_checkpoints,
    }.items():
        Path("code.txt").write_text("no image")
        assert line in rejected(*words)


def test_imported_weights_without_discriminators_can_be_evaluated(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    import_network("resnet_6")
    Path("rows").mkdir()
    Image.fromarray(np.random.default_rng(0).integers(256, size=(32, 64, 3), dtype=np.uint8)).save("rows/0.png")
    capsys.readouterr()
    assert run(["evaluate", "ours.safetensors", "--data-root", "rows", "--accelerator", "cpu"]) == 0
    by_image = capsys.readouterr().out
    assert "on all samples in rows (panels): 1 sample\n" in by_image and "psnr" in by_image
    words = ["--data-root", "rows", "--accelerator", "cpu", "--set", "batchnorm=running"]
    assert run(["evaluate", "ours.safetensors", *words]) == 0
    assert capsys.readouterr().out != by_image


def test_metadata_is_reproducible_and_contains_no_folder_or_source_file() -> None:
    tensors, metadata = read_tensors(Path("alone.safetensors"))
    assert metadata[RECIPE] == "restoration" and "own" not in metadata[DATA]
    assert json.loads(metadata[DATA])["data"] == "pairs"
    contents = []
    for name in ("one", "two"):
        assert not write_tensors(Path(name), tensors, metadata).aliases
        contents.append(Path(name).read_bytes())
    assert contents[0] == contents[1]
    stranger = {**metadata, DATA: json.dumps({"data": "./code.py"})}
    write_tensors(Path("stranger.safetensors"), tensors, stranger)
    Path("code.py").write_text("raise SystemExit('ran')")
    assert run(["apply", "stranger.safetensors", "other/input/0.png", "--out", "stranger"]) == 2
