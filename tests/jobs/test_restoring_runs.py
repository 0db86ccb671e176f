"""Runs that restore pictures, as a person uses them: stages, starting weights, strips, numbers on other pictures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from commands import run_fork, run_ranks
from PIL import Image
from skimage import data

from paceline.cli import run
from paceline.engine.checkpoint import Checkpoints, choose_checkpoint
from paceline.jobs._stages import stages_of
from paceline.jobs.configure import configure
from paceline.monitor.metrics import read_metrics

NETWORKS = ["num_blocks=1", "width=2", "d_width=2", "vgg=random", "vgg_layer=relu2_1", "scale=2"]
CADENCE = ["evaluate_every=32 images", "sample_every=16 images", "save_every=16 images", "keep=9"]
SETTINGS = [word for setting in NETWORKS + CADENCE for word in ("--set", setting)]
TRAIN = ["train", "super_resolution", "--data", "photos", "--data-root", "photos", "--accelerator", "cpu", *SETTINGS]
TRAIN += ["--crop", "16", "--batch-size", "8", "--images", "32", "--lr", "0.01"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with some photographs, a test set with small pictures, and a run of two stages."""
    folder = tmp_path_factory.mktemp("restoring")
    picture = data.astronaut()
    for number in range(10):
        height, width = 32 + 2 * number, 56 - 2 * number
        save(folder / "photos" / f"{number}.png", picture[20 * number : 20 * number + height, 200 : 200 + width])
    for number in range(3):
        high = picture[300 + 40 * number : 340 + 40 * number, 100 : 150 + 2 * number]
        low = Image.fromarray(high).resize((high.shape[1] // 2, 20), Image.Resampling.BICUBIC)
        save(folder / "set3" / "HR" / f"{number}.png", high)
        save(folder / "set3" / "LR" / f"{number}.png", np.asarray(low))
    trained = run_fork(folder, *TRAIN, "--set", "stage=both", "--out", "both")
    assert trained.wait() == 0, trained.stderr
    return folder


@pytest.fixture(autouse=True)
def inside(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def save(path: Path, picture: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture).save(path)


def weights(folder: str, which: str = "last") -> dict[str, torch.Tensor]:
    return choose_checkpoint(Checkpoints(Path(folder) / "checkpoints"), which).weights


def test_both_stages_are_runs_of_their_own_the_second_from_the_best_of_the_first():
    assert {name.split(".")[0] for name in weights("both/pretrain")} == {"generator"}
    assert {name.split(".")[0] for name in weights("both/adversarial")} == {"generator", "discriminator"}
    kept = Path("both/adversarial/config.toml").read_text()
    assert 'init_from = "both/pretrain"' in kept and 'stage = "adversarial"' in kept
    rows, _ = read_metrics(Path("both/adversarial"))
    assert {"generator/perceptual", "generator/adversarial", "discriminator/real"} <= set().union(*rows)


def test_a_test_picture_that_cannot_be_judged_is_named_before_training(place):
    save(place / "flat" / "wide.png", data.astronaut()[:14, :60])
    refused = run_fork(place, *TRAIN, "--test-root", "flat", "--out", "unjudged")
    assert refused.wait() == 2 and "wide.png: a side of 14 pixels is too short to compare" in refused.stderr
    assert not (place / "unjudged").exists()


def test_a_second_start_goes_on_with_the_stage_that_had_begun(place):
    before = {path: path.stat().st_mtime_ns for path in Path("both/pretrain").rglob("*") if path.is_file()}
    again = run_fork(place, *TRAIN, "--set", "stage=both", "--out", "both")
    assert again.wait() == 0 and "finished already, at 32 images" in again.stdout
    assert before == {path: path.stat().st_mtime_ns for path in Path("both/pretrain").rglob("*") if path.is_file()}


def test_a_stage_that_was_stopped_is_finished_before_the_next_one_begins(tmp_path):
    config = configure("super_resolution", {"out": str(tmp_path / "run")}, assignments=["stage=both"])
    assert [Path(stage.run.out).name for stage in stages_of(config)] == ["pretrain", "adversarial"]
    (tmp_path / "run/pretrain").mkdir(parents=True)
    (tmp_path / "run/pretrain/config.toml").touch()
    assert [Path(stage.run.out).name for stage in stages_of(config)] == ["pretrain", "adversarial"]
    (tmp_path / "run/adversarial").mkdir()
    (tmp_path / "run/adversarial/config.toml").touch()
    assert [stage.recipe.stage for stage in stages_of(config)] == ["adversarial"]


def test_two_processes_go_through_both_stages(place):
    # With a rate of zero the weights stay those that the first stage began with.
    words = [*TRAIN, "--set", "stage=both", "--lr", "0", "--set", "perceptual=0", "--images", "8", "--strategy", "ddp"]
    assert run_ranks(place, 2, *words, "--out", "ranks") == [0, 0]
    start, end = weights("ranks/pretrain"), weights("ranks/adversarial")
    assert all(torch.equal(start[name], end[name]) for name in start if "norm" not in name and ".body.1." not in name)


@pytest.mark.parametrize("origin", ["a run", "a file"])
def test_a_run_starts_from_given_weights(place, origin, tmp_path):
    best = weights("both/pretrain", "best")
    path = "both/pretrain"
    if origin == "a file":
        path = str(tmp_path / "weights.safetensors")
        safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in best.items()}, path)
    words = [*TRAIN, "--set", "stage=adversarial", "--set", "perceptual=0", "--lr", "0", "--images", "8"]
    started = run_fork(place, *words, "--init-from", path, "--out", str(tmp_path / "run"))
    assert started.wait() == 0, started.stderr
    assert f"starts from {path}" in started.stdout and "generator" in started.stdout
    found = weights(str(tmp_path / "run"))
    parameters = [name for name in best if "running" not in name and "num_batches" not in name]
    assert all(torch.equal(found[name], best[name]) for name in parameters)


def test_training_keeps_strips_which_sample_shows_again_and_animates(capsys):
    names = sorted(path.name for path in Path("both/pretrain/samples").iterdir())
    assert names == [f"samples-{images:012}.png" for images in (0, 16, 32)]
    assert run(["sample", "both/pretrain", "--checkpoint", "last", "--accelerator", "cpu"]) == 0
    with Image.open("both/pretrain/grid.png") as shown, Image.open(f"both/pretrain/samples/{names[-1]}") as kept:
        assert np.array_equal(np.asarray(shown), np.asarray(kept))
        assert shown.width > 4 * 32  # low, bicubic, restored and target
    assert run(["sample", "both/pretrain", "--animate", "--out", "moving.gif"]) == 0
    with Image.open("moving.gif") as moving:
        assert moving.n_frames == 3


def test_a_folder_of_photographs_is_judged_as_a_whole_from_its_small_pictures(capsys):
    command = ["evaluate", "both/pretrain", "--data", "photos", "--data-root", "set3/HR", "--accelerator", "cpu"]
    assert run([*command, "--set", "low_root=set3/LR"]) == 0
    printed = capsys.readouterr().out
    numbers = dict(line.split() for line in printed.splitlines() if line.startswith("  "))
    assert float(numbers["count"]) == 3
    assert {"psnr[y]", "ssim[y]", "bicubic_psnr[y]", "bicubic_ssim[y]"} < numbers.keys()
    assert 15 < float(numbers["bicubic_psnr[y]"]) < 45
    assert "measured with protocol y, border 2" in printed
    assert run([*command, "--set", "low_root=set3/LR", "--set", "protocol=rgb"]) == 0
    assert "bicubic_psnr[rgb]" in capsys.readouterr().out


def test_the_protocol_is_kept_with_the_numbers():
    kept = json.loads(Path("both/pretrain/protocols.json").read_text())
    assert kept["validation"]["y"]["border"] == 2


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--init-from", "nowhere"], "--init-from nowhere: expected a run's folder or a .safetensors file"),
        (["--init-from", "photos"], "photos/checkpoints: has no checkpoint yet"),
        (["--init-from", "both/pretrain", "--set", "scale=4"], "its generator is another network"),
        (["--init-from", "both/pretrain", "--set", "width=3"], "its generator is another network"),
        (["--set", "stage=adversarial", "--vgg", "none.pth"], "--vgg none.pth: no such file"),
        (["--set", "scale=3"], "unknown value '3'"),
        (["--set", "stage=adversarial", "--set", "vgg_layer=conv9"], "unknown layer of VGG19 'conv9'"),
    ],
)
def test_a_mistake_is_one_line(words, line, capsys, tmp_path):
    assert run([*TRAIN, *words, "--out", str(tmp_path / "run")]) == 2
    told = capsys.readouterr().err
    assert line in told and len(told.splitlines()) == 1


def test_the_folder_of_several_stages_is_no_run_and_says_which_are(capsys):
    assert run(["evaluate", "both"]) == 2
    assert "its stages are runs: both/adversarial, both/pretrain" in capsys.readouterr().err


def test_weights_of_a_file_that_holds_other_networks_are_refused(capsys, tmp_path):
    path = tmp_path / "other.safetensors"
    safetensors.torch.save_file({"encoder.weight": torch.zeros(1)}, path)
    assert run([*TRAIN, "--init-from", str(path), "--out", str(tmp_path / "run")]) == 2
    assert "holds none of the networks generator" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "run", ignore_errors=True)


def test_two_processes_give_the_weights_of_one_with_the_frozen_network_too(place, tmp_path):
    generator = torch.Generator().manual_seed(0)
    layers = {"features.0.weight": (4, 3), "features.2.weight": (4, 4), "features.5.weight": (5, 4)}
    tensors = {name: torch.randn(*shape, 3, 3, generator=generator) for name, shape in layers.items()}
    safetensors.torch.save_file(tensors, tmp_path / "vgg.safetensors")
    words = ["--set", "stage=adversarial", "--vgg", str(tmp_path / "vgg.safetensors"), "--set", "vgg_layer=conv2_1"]
    words += ["--data-root", "photos", "--crop", "16", "--set", "width=2", "--set", "d_width=2", "--accelerator", "cpu"]
    verified = run_fork(place, "verify", "super_resolution", "--strategies", "single,ddp", "--steps", "3", *words)
    assert verified.wait() == 0, verified.stdout + verified.stderr
    assert verified.stdout.count("generator") == verified.stdout.count("discriminator") == 2  # gradients and weights
