"""Code that a stranger's run, weights file or settings file refers to runs only if the user allows it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
from running import Running, run_fork, start_function_in_ranks
from safetensors import safe_open

import paceline
from paceline.commands.new import new
from paceline.core.errors import UserError

TINY_GAN = str(Path(__file__).parents[1] / "tiny_gan.py")
IMAGES = Path(__file__).parents[2] / "docs/examples/digits"
SHORT = ("--images", "64", "--set", "width=8", "--accelerator", "cpu")
CODE = "open('canary', 'w').close()\nraise SystemExit('the code ran')\n"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    trained = run_fork(folder, "train", "classification", *SHORT, "--out", "run")
    assert trained.wait() == 0, trained.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the user's own recipe and source, and a run trained with both."""
    folder = tmp_path_factory.mktemp("mine")
    new("recipe", "my_recipe", folder)
    new("source", "shapes", folder)
    trained = run_fork(folder, "train", "./my_recipe.py", "--data", "./shapes.py", *SHORT, "--out", "run")
    assert trained.wait() == 0, trained.stderr
    return folder


def hostile(folder: Path, good: Path, **settings: str) -> Path:
    """Return a copy of a run whose config refers to a code file in the copy."""
    run = folder / "stranger"
    shutil.copytree(good, run)
    written, table, others = (run / "config.toml").read_text().partition("\n[")
    kept = [line for line in written.splitlines() if line.partition(" = ")[0] not in settings]
    lines = [*kept, *(f"{name} = {json.dumps(value)}" for name, value in settings.items())]
    (run / "config.toml").write_text("\n".join(lines) + table + others)
    (run / "x.py").write_text(CODE)
    return run


def refused(running: Running, name: str, code: str) -> bool:
    """Return whether the command failed with one line that names the code. Fail the test if the code ran."""
    assert not (running.folder / "canary").exists(), "the code ran"
    line = f"paceline: {name}: refers to code ({code}), which runs only with --trust\n"
    return running.wait() == 2 and running.stderr == line


@pytest.mark.parametrize(
    "command",
    [
        ("evaluate", "stranger"),
        ("sample", "stranger"),
        ("predict", "stranger", str(IMAGES)),
        ("apply", "stranger", str(IMAGES), "--out", "results"),
        ("train", "dcgan", "--preset", "quick", *SHORT[:2], "--set", "features=stranger", "--out", "new"),
    ],
    ids=lambda command: command[0],
)
def test_no_command_runs_the_recipe_file_from_an_untrusted_run(
    command: tuple[str, ...], good: Path, tmp_path: Path
) -> None:
    hostile(tmp_path, good, recipe="stranger/x.py")
    assert refused(run_fork(tmp_path, *command), "stranger", "stranger/x.py")


@pytest.mark.parametrize("setting", ["data", "loader", "strategy"])
def test_evaluate_runs_no_plugin_from_an_untrusted_run(setting: str, good: Path, tmp_path: Path) -> None:
    hostile(tmp_path, good, **{setting: "./stranger/x.py"})
    assert refused(run_fork(tmp_path, "evaluate", "stranger"), "stranger", "./stranger/x.py")
    if setting == "data":  # the user's `--data` replaces the run's data setting
        assert run_fork(tmp_path, "evaluate", "stranger", "--data", "digits").wait() == 0


def test_code_that_a_weights_file_refers_to_does_not_run(good: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text(CODE)
    weights = safetensors.torch.load_file(next(good.glob("checkpoints/*/weights.safetensors")))
    spec = (good / "data_spec.json").read_text()
    for recipe, settings in (("./x.py", {}), ("classification", {"data": "./x.py"})):
        metadata = {"paceline.format": "2", "paceline.recipe": recipe, "paceline.settings": json.dumps(settings)}
        metadata |= {"paceline.protocol": "y", "paceline.data_spec": spec}
        safetensors.torch.save_file(weights, "stranger.safetensors", metadata)
        with safe_open("stranger.safetensors", "pt") as file:
            assert file.metadata()["paceline.recipe"] == recipe
        with pytest.raises(UserError, match=r"^stranger.safetensors: refers to code \(./x.py\), which runs only"):
            paceline.load("stranger.safetensors", device="cpu")
        assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("setting", ["data", "loader", "strategy", "loggers"])
def test_code_that_a_settings_file_refers_to_does_not_run(setting: str, good: Path, tmp_path: Path) -> None:
    """A run's config and any other TOML file are treated alike."""
    hostile(tmp_path, good, **{setting: "./stranger/x.py"})
    (tmp_path / "plain.toml").write_text(f'{setting} = "tensorboard, ./stranger/x.py"\n'.replace(
        "tensorboard, ", "tensorboard, " if setting == "loggers" else ""
    ))  # fmt: skip
    for file in ("stranger/config.toml", "plain.toml"):
        trained = run_fork(tmp_path, "train", "classification", "--config", file, "--out", "new")
        assert refused(trained, f"--config {file}", "./stranger/x.py")


def test_a_run_cannot_mark_a_torchscript_file_as_trusted(good: Path, tmp_path: Path) -> None:
    """Only the user can set `inception_sha256` (in either spelling), which allows TorchScript code to run."""
    from paceline.runs.finished_run import config_of

    for name in ("inception_sha256", "inception-sha256"):
        run = hostile(tmp_path / name, good, **{name: "0" * 64, "resume-from": "s3://elsewhere/run"})
        settings = config_of(str(run)).run
        assert settings.inception_sha256 == "" and settings.resume_from == ""
    (tmp_path / "plain.toml").write_text('inception_sha256 = "00"\n')
    rejected = run_fork(tmp_path, "train", "dcgan", "--config", "plain.toml")
    assert rejected.wait() == 2 and "inception_sha256" in rejected.stderr and "--trust" in rejected.stderr


def test_reports_show_a_run_without_running_its_code(good: Path, mine: Path, tmp_path: Path) -> None:
    hostile(tmp_path, good, recipe="stranger/x.py", data="./stranger/x.py", strategy="./stranger/x.py")
    compared = run_fork(tmp_path, "compare", "stranger", "--out", "report")
    assert compared.wait() == 0, compared.stderr
    assert not (tmp_path / "canary").exists()
    assert "test top-1" in (tmp_path / "report/report.md").read_text()
    assert run_fork(mine, "compare", "run", "--out", "report").wait() == 0


def test_the_users_own_code_runs_with_the_trust_option(mine: Path) -> None:
    rejected = run_fork(mine, "evaluate", "run")
    assert refused(rejected, "run", "./my_recipe.py")
    for command in (("evaluate", "run"), ("predict", "run", str(IMAGES)), ("compare", "run", "--out", "report")):
        used = run_fork(mine, *command, "--trust")
        assert used.wait() == 0, used.stderr


def test_the_trust_option_applies_to_worker_processes_too(mine: Path) -> None:
    used = run_fork(mine, "evaluate", "run", "--trust", "--devices", "2", "--accelerator", "cpu")
    assert used.wait() == 0, used.stderr


def test_code_passed_on_the_command_line_runs_without_the_trust_option(mine: Path) -> None:
    """If the user passes the code files again, `train` can resume the run or start a new run from its config."""
    again = ("--config", "run/config.toml", "--data", "./shapes.py", "--out", "second")
    assert run_fork(mine, "train", "./my_recipe.py", *again).wait() == 0
    longer = run_fork(mine, "train", "./my_recipe.py", "--data", "./shapes.py", *SHORT[2:], "--out", "run")
    assert longer.wait() == 0, longer.stderr


def test_load_runs_code_only_if_trust_is_true(mine: Path, monkeypatch) -> None:
    monkeypatch.chdir(mine)
    with pytest.raises(UserError, match="--trust"):
        paceline.load("run", device="cpu")
    assert paceline.load("run", device="cpu", trust=True).classes
    assert paceline.load("run", device="cpu").classes  # this process has already loaded the code


def train_with_features(recipe: str, trust: bool) -> None:
    settings = {"images": 32, "size": 16, "channels": 1, "features": "run", "few_images": "allow"}
    paceline.train(recipe, data="digits", accelerator="cpu", out=f"gan-{trust}", trust=trust, **settings)


def test_code_from_the_features_run_is_loaded_only_with_trust(mine: Path) -> None:
    (rejected,) = start_function_in_ranks(mine, 1, train_with_features, TINY_GAN, False)
    assert rejected.wait() == 1 and "refers to code (./my_recipe.py), which runs only with --trust" in rejected.stderr
    (used,) = start_function_in_ranks(mine, 1, train_with_features, TINY_GAN, True)
    assert used.wait() == 0, used.stderr
