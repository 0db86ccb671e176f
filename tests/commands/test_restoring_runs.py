"""Training and evaluating restoration runs: stages, initial weights, image strips and metrics."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from photographs import photograph
from PIL import Image
from running import Running, run_fork, run_hosts, run_ranks

from paceline.cli.app import run
from paceline.commands.configure import configure
from paceline.contracts.recipe import DataSpec
from paceline.inference.trained import build
from paceline.runs.checkpoint import Checkpoints, choose_checkpoint
from paceline.runs.finished_run import stages_of
from paceline.runs.metrics import read_metrics
from paceline.runs.weights import write_weights


def sets(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


NETWORKS = ["num_blocks=1", "width=2", "d_width=2", "vgg=random", "vgg_layer=relu2_1", "scale=2"]
CADENCE = ["evaluate_every=32 images", "sample_every=16 images", "save_every=16 images", "keep=9"]
TRAIN = ["train", "super_resolution", "--data", "photos", "--data-root", "photos", "--accelerator", "cpu"]
TRAIN += [*sets(*NETWORKS, *CADENCE), "--crop", "16", "--batch-size", "8", "--images", "32", "--lr", "0.01"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with some photos, a test set with low-resolution images, and a run with two stages."""
    folder = tmp_path_factory.mktemp("restoring")
    image = photograph("astronaut")
    for number in range(10):
        height, width = 32 + 2 * number, 56 - 2 * number
        save(folder / "photos" / f"{number}.png", image[20 * number : 20 * number + height, 200 : 200 + width])
    for number in range(3):
        high = image[300 + 40 * number : 340 + 40 * number, 100 : 150 + 2 * number]
        low = Image.fromarray(high).resize((high.shape[1] // 2, 20), Image.Resampling.BICUBIC)
        save(folder / "set3" / "HR" / f"{number}.png", high)
        save(folder / "set3" / "LR" / f"{number}.png", np.asarray(low))
    trained = run_fork(folder, *TRAIN, "--set", "stage=both", "--out", "both")
    assert trained.wait() == 0, trained.stderr
    return folder


@pytest.fixture(autouse=True)
def inside(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def save(path: Path, image: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)


def weights(folder: str, which: str = "last") -> dict[str, torch.Tensor]:
    return choose_checkpoint(Checkpoints(Path(folder) / "checkpoints"), which).weights


def test_each_stage_is_a_run_and_the_second_starts_from_the_best_checkpoint_of_the_first():
    assert {name.split(".")[0] for name in weights("both/pretrain")} == {"generator"}
    assert {name.split(".")[0] for name in weights("both/adversarial")} == {"generator", "discriminator"}
    kept = Path("both/adversarial/config.toml").read_text()
    assert 'init_from = "both/pretrain"' in kept and 'stage = "adversarial"' in kept
    rows = read_metrics(Path("both/adversarial"))
    assert {"generator/perceptual", "generator/adversarial", "discriminator/real"} <= set().union(*rows)


def test_a_file_missing_for_a_later_stage_is_reported_before_training_starts(place):
    rejected = run_fork(place, *TRAIN, "--set", "stage=both", "--vgg", "nope.pth", "--out", "lacking")
    assert rejected.wait() == 2 and "--vgg nope.pth: no such file" in rejected.stderr
    assert not (place / "lacking").exists()


def test_a_test_image_that_cannot_be_evaluated_is_reported_before_training(place):
    save(place / "flat" / "wide.png", photograph("astronaut")[:14, :60])
    rejected = run_fork(place, *TRAIN, "--test-root", "flat", "--out", "unevaluated")
    assert rejected.wait() == 2 and "wide.png: a side of 14 pixels is too short to compare" in rejected.stderr
    assert not (place / "unevaluated").exists()


def test_repeating_the_command_does_not_repeat_a_finished_stage(place):
    before = {path: path.stat().st_mtime_ns for path in Path("both/pretrain").rglob("*") if path.is_file()}
    again = run_fork(place, *TRAIN, "--set", "stage=both", "--out", "both")
    assert again.wait() == 0 and "finished at 32 images" in again.stdout
    assert before == {path: path.stat().st_mtime_ns for path in Path("both/pretrain").rglob("*") if path.is_file()}


def test_a_stopped_stage_is_finished_before_the_next_one_starts(tmp_path):
    config = configure("super_resolution", {"out": str(tmp_path / "run")}, assignments=["stage=both"])
    assert [Path(stage.run.out).name for stage in stages_of(config)] == ["pretrain", "adversarial"]
    (tmp_path / "run/pretrain").mkdir(parents=True)
    (tmp_path / "run/pretrain/config.toml").touch()
    assert [Path(stage.run.out).name for stage in stages_of(config)] == ["pretrain", "adversarial"]
    (tmp_path / "run/adversarial").mkdir()
    (tmp_path / "run/adversarial/config.toml").touch()
    assert [stage.recipe.stage for stage in stages_of(config)] == ["adversarial"]


def test_two_processes_train_both_stages(place):
    # With a learning rate of zero, the weights do not change in either stage.
    words = [*TRAIN, "--set", "stage=both", "--lr", "0", "--set", "perceptual=0", "--images", "8", "--strategy", "ddp"]
    assert run_ranks(place, 2, *words, "--out", "ranks") == [0, 0]
    start, end = weights("ranks/pretrain"), weights("ranks/adversarial")
    assert all(torch.equal(start[name], end[name]) for name in start if "norm" not in name and ".body.1." not in name)


def run_two_hosts(first: Path, second: Path, *words: str) -> list[Running]:
    """Resume a two-stage run in two processes with separate folders."""
    root = str(Path("photos").absolute())
    words = (*TRAIN, "--set", "stage=both", "--data-root", root, "--strategy", "ddp", "--timeout", "60", *words)
    hosts = run_hosts([first, second], *words, "--out", "both")
    assert [host.wait() for host in hosts] == [0, 0], [host.stderr for host in hosts]
    return hosts


@pytest.mark.parametrize("replaced", [0, 1])
def test_a_replaced_host_resumes_the_stage_that_the_other_host_had_started(replaced, tmp_path):
    folders = [tmp_path / "0", tmp_path / "1"]
    folders[replaced].mkdir()
    shutil.copytree("both/adversarial", folders[1 - replaced] / "both/adversarial")
    hosts = run_two_hosts(*folders, "--images", "40")
    assert "resuming from 32 images" in hosts[0].stdout and "pretrain" not in hosts[0].stdout
    first, second = (weights(str(folder / "both/adversarial")) for folder in folders)
    assert all(torch.equal(first[name], second[name]) for name in first)
    # The first stage's folder is no longer needed.
    assert not any((folder / "both/pretrain").exists() for folder in folders)


def test_a_stage_without_a_checkpoint_starts_from_the_weights_of_the_most_advanced_host(tmp_path):
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        shutil.copytree("both/pretrain", folder / "both/pretrain")
    shutil.rmtree(folders[0] / "both/pretrain/checkpoints/000000000032")  # this host lacks the last checkpoint
    (folders[1] / "both/adversarial").mkdir()
    # The second stage was killed before its first save.
    shutil.copy("both/adversarial/config.toml", folders[1] / "both/adversarial")
    hosts = run_two_hosts(*folders, "--lr", "0", "--set", "perceptual=0", "--images", "8")
    assert "initialised from both/pretrain at 32 images: generator" in hosts[0].stdout
    best = weights("both/pretrain", "best")
    parameters = [name for name in best if "norm" not in name and ".body.1." not in name]
    for folder in folders:
        found = weights(str(folder / "both/adversarial"))
        assert all(torch.equal(found[name], best[name]) for name in parameters)


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
    assert f"initialised from {path}" in started.stdout and "generator" in started.stdout
    found = weights(str(tmp_path / "run"))
    parameters = [name for name in best if "running" not in name and "num_batches" not in name]
    assert all(torch.equal(found[name], best[name]) for name in parameters)


def test_the_sample_command_shows_and_animates_the_image_strips_saved_by_training(rejected):
    names = sorted(path.name for path in Path("both/pretrain/samples").iterdir())
    assert names == [f"samples-{images:012}.png" for images in (0, 16, 32)]
    assert run(["sample", "both/pretrain", "--checkpoint", "last", "--accelerator", "cpu"]) == 0
    with Image.open("both/pretrain/grid.png") as shown, Image.open(f"both/pretrain/samples/{names[-1]}") as kept:
        assert np.array_equal(np.asarray(shown), np.asarray(kept))
        assert shown.width > 4 * 32  # four images: low resolution, bicubic, restored and target
    for flags in (["--grid", "2x2"], ["--interpolate"]):
        line = rejected("sample", "both/pretrain", "--accelerator", "cpu", *flags)
        assert f"{' '.join(flags)}: only for generators, but SuperResolution transforms images" in line
    assert run(["sample", "both/pretrain", "--animate", "--out", "moving.gif"]) == 0
    with Image.open("moving.gif") as moving:
        assert moving.n_frames == 3


def test_all_photos_in_a_folder_are_evaluated_using_their_low_resolution_images(capsys):
    command = ["evaluate", "both/pretrain", "--data", "photos", "--data-root", "set3/HR", "--accelerator", "cpu"]
    assert run([*command, "--set", "low_root=set3/LR"]) == 0
    printed = capsys.readouterr().out
    numbers = dict(line.split() for line in printed.splitlines() if line.startswith("  "))
    assert float(numbers["count"]) == 3
    assert {"psnr[y]", "ssim[y]", "bicubic_psnr[y]", "bicubic_ssim[y]"} < numbers.keys()
    assert 15 < float(numbers["bicubic_psnr[y]"]) < 45
    assert "measured with protocol y, border 2" in printed
    assert run([*command, "--low-root", "set3/LR"]) == 0
    assert capsys.readouterr().out == printed
    others = ["--test-root", "set3/HR", "--test-low-root", "set3/LR", "--accelerator", "cpu"]
    assert run(["evaluate", "both/pretrain", *others]) == 0  # the run's own test images are not used
    assert capsys.readouterr().out == printed
    assert run([*command, "--set", "low_root=set3/LR", "--set", "protocol=rgb"]) == 0
    assert "bicubic_psnr[rgb]" in capsys.readouterr().out


def test_the_evaluation_protocol_is_saved_with_the_metrics():
    kept = json.loads(Path("both/pretrain/protocols.json").read_text())
    assert kept["validation"]["y"]["border"] == 2


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--init-from", "nowhere"], "--init-from nowhere: no such file or folder"),
        (["--init-from", "photos"], "--init-from photos: has no checkpoint yet"),
        (["--init-from", "both"], "choose one of the runs in it: both/adversarial, both/pretrain"),
        (["--init-from", "both/pretrain", "--set", "scale=4"], "trained with scale=2 (not 4): use --set scale=2"),
        (["--init-from", "both/pretrain", "--set", "output=tanh"], "use --set output=residual"),
        (["--init-from", "both/pretrain", "--set", "width=3"], "trained with width=2 (not 3): use --set width=2"),
        (
            ["--init-from", "both/pretrain", *sets("blocks=shared", "num_blocks=2", "width=3", "tv=1")],
            "--set blocks=separate --set num_blocks=1 --set width=2",
        ),
        (["--set", "stage=adversarial", "--vgg", "none.pth"], "--vgg none.pth: no such file"),
        (["--set", "scale=5"], "unknown value '5'"),
        (["--set", "stage=adversarial", "--set", "vgg_layer=conv9"], "unknown layer of VGG19 'conv9'"),
    ],
)
def test_a_user_error_prints_one_line(words, line, rejected, tmp_path):
    assert line in rejected(*TRAIN, *words, "--out", tmp_path / "run")


def test_evaluate_and_sample_use_the_last_finished_stage(capsys, tmp_path):
    assert run(["evaluate", "both", "--accelerator", "cpu"]) == 0
    of_folder = capsys.readouterr().out
    assert run(["evaluate", "both/adversarial", "--accelerator", "cpu"]) == 0
    assert of_folder == capsys.readouterr().out
    assert run(["sample", "both", "--accelerator", "cpu", "--out", str(tmp_path / "strips.png")]) == 0
    assert "adversarial at 32 images" in capsys.readouterr().out


def test_a_folder_of_runs_is_rejected_and_some_of_its_runs_are_listed(capsys, tmp_path):
    for number in range(7):
        (tmp_path / f"run-{number}").mkdir()
        shutil.copy("both/pretrain/config.toml", tmp_path / f"run-{number}")
    assert run(["evaluate", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert f"choose one of the runs in it: {tmp_path}/run-0, " in printed and "run-4 and 2 more" in printed


def test_apply_uses_the_last_finished_stage(capsys, tmp_path):
    words = ["photos/0.png", "--accelerator", "cpu", "--out"]
    assert run(["apply", "both", *words, str(tmp_path / "last")]) == 0
    assert "super_resolution from both/adversarial at 32 images" in capsys.readouterr().out
    both = tmp_path / "both"
    shutil.copytree("both", both)
    leave_unfinished(both / "adversarial")
    metrics = both / "adversarial/metrics.jsonl"
    metrics.write_text("".join(line for line in metrics.open() if "test/checkpoint_images" not in line))
    assert run(["apply", str(both), *words, str(tmp_path / "first")]) == 0
    printed = capsys.readouterr()
    assert "both/pretrain at 32 images" in printed.out
    assert printed.err.startswith(f"{both}/adversarial has not finished: using {both}/pretrain\n")
    assert (tmp_path / "first/0.png").read_bytes() != (tmp_path / "last/0.png").read_bytes()


def leave_unfinished(run_folder: Path) -> None:
    status = run_folder / "status.json"
    status.write_text(status.read_text().replace("finished", "stopped"))


def test_a_weights_file_for_different_networks_is_rejected(capsys, tmp_path):
    path = tmp_path / "other.safetensors"
    safetensors.torch.save_file({"encoder.weight": torch.zeros(1)}, path)
    assert run([*TRAIN, "--init-from", str(path), "--out", str(tmp_path / "run")]) == 2
    advice = f"to convert weights from another project, use paceline import {path} --out FILE.safetensors"
    assert f"contains none of the networks generator; {advice}" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "run", ignore_errors=True)


def test_weights_with_matching_shapes_but_conflicting_settings_are_rejected(capsys, tmp_path):
    shared = configure("super_resolution", {}, assignments=[*NETWORKS, "blocks=shared"], elsewhere=True)
    spec = DataSpec(3, 16, 16)
    write_weights(tmp_path / "shared.safetensors", shared, spec, build(shared, spec).state_dict())
    words = [*TRAIN, "--set", "blocks=shared", "--init-from", str(tmp_path / "shared.safetensors"), "--images", "8"]
    assert run([*words, "--set", "num_blocks=3", "--set", "scale=4", "--out", str(tmp_path / "other")]) == 2
    assert "scale=2 (not 4), num_blocks=1 (not 3): use --set scale=2 --set num_blocks=1" in capsys.readouterr().err
    assert not (tmp_path / "other/config.toml").exists()
    assert run([*words, "--out", str(tmp_path / "same")]) == 0


def test_a_started_run_no_longer_needs_its_initial_weights_file(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree("both/pretrain", tmp_path / "given")
    words = [*TRAIN, "--init-from", "~/given", "--set", "ema_half_life=8 images", "--out", str(tmp_path / "run")]
    assert run([*words, "--images", "8", "--lr", "0"]) == 0
    started = weights(str(tmp_path / "run"))
    emas = [name for name in started if name.startswith("ema/") and "running" not in name]
    assert emas and all(torch.equal(started[name], started[name.removeprefix("ema/")]) for name in emas)
    shutil.rmtree(tmp_path / "given")
    assert run([*words, "--images", "16", "--lr", "0"]) == 0


@pytest.mark.slow
def test_two_processes_produce_the_same_weights_as_one_even_with_a_frozen_network(place, tmp_path):
    generator = torch.Generator().manual_seed(0)
    layers = {"features.0.weight": (4, 3), "features.2.weight": (4, 4), "features.5.weight": (5, 4)}
    tensors = {name: torch.randn(*shape, 3, 3, generator=generator) for name, shape in layers.items()}
    safetensors.torch.save_file(tensors, tmp_path / "vgg.safetensors")
    words = ["--set", "stage=adversarial", "--vgg", str(tmp_path / "vgg.safetensors"), "--set", "vgg_layer=conv2_1"]
    words += ["--data-root", "photos", "--crop", "16", "--set", "width=2", "--set", "d_width=2", "--accelerator", "cpu"]
    verified = run_fork(place, "verify", "super_resolution", "--strategies", "single,ddp", "--steps", "3", *words)
    assert verified.wait() == 0, verified.stdout + verified.stderr
    # Each network is listed once for its gradients and once for its weights.
    assert verified.stdout.count("generator") == verified.stdout.count("discriminator") == 2
