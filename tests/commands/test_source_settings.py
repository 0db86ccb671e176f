"""Source settings are given, saved and checked like run settings, and rejected for other sources."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from running import run_fork

from paceline.commands.new import new
from paceline.config.files import changed_settings
from paceline.config.resolve import resolve
from paceline.contracts.recipe import Recipe
from paceline.core import registry
from paceline.core.errors import UserError
from paceline.data.source import Source
from paceline.runs.finished_run import config_of

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "data.md"
SHORT = ("--images", "64", "--batch-size", "64", "--set", "width=8", "--accelerator", "cpu")
TRAIN = ("train", "classification", "--data", "./shapes.py", *SHORT, "--out", "run")
UNFIT = "its Settings must be a frozen @dataclass that extends RunSettings"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a user source, and a run that changes the source's `noise` setting."""
    folder = tmp_path_factory.mktemp("own")
    new("source", "shapes", folder)
    trained = run_fork(folder, *TRAIN, "--set", "noise=3")
    assert trained.wait() == 0, trained.stderr
    return folder


def source_file(folder: Path, settings: str) -> str:
    """Write a source file whose class body consists of the given lines, and return its path."""
    lines = ["from dataclasses import dataclass", "from paceline.data.source import ArraySource"]
    lines += ["from paceline.config.settings import RunSettings, setting", "class Own(ArraySource):"]
    file = folder / "own.py"
    file.write_text("\n".join([*lines, *(f"    {line}" for line in settings.splitlines())]) + "\n")
    return str(file)


def rejected(*layers: tuple[str, dict[str, Any]]) -> str:
    with pytest.raises(UserError) as caught:
        resolve("own", Recipe, layers)
    return str(caught.value)


def test_a_setting_of_a_user_source_is_saved_and_changes_the_data(place: Path) -> None:
    kept = (place / "run" / "config.toml").read_text()
    assert "noise = 3.0" in kept and "degrade" not in kept and "panels" not in kept
    source_class = registry.load_class("source", str(place / "shapes.py"), Source)
    still, noisy = (source_class("test", source_class.Settings(noise=noise)).read(0)["image"] for noise in (0.0, 50.0))
    assert len(np.unique(still)) == 2 and len(np.unique(noisy)) > 20


def test_the_same_command_resumes_a_run_and_a_different_setting_is_rejected(place: Path) -> None:
    again = run_fork(place, *TRAIN, "--set", "noise=3", "--images", "128")
    assert again.wait() == 0 and "resuming from 64 images" in again.stdout, again.stderr
    other = run_fork(place, *TRAIN, "--set", "noise=4", "--images", "128")
    assert other.wait() == 2 and "(noise: 3.0 → 4.0)" in other.stderr
    evaluated = run_fork(place, "evaluate", "run", "--trust", "--accelerator", "cpu")
    assert evaluated.wait() == 0 and "test split of ./shapes.py" in evaluated.stdout, evaluated.stderr


def test_a_wrong_value_for_a_source_setting_is_reported_in_one_line(place: Path) -> None:
    for assignment, line in (
        ("noise=-1", "noise=-1: must be at least 0"),
        ("noise=much", "--set noise: 'much' is not a num"),
    ):
        wrong = run_fork(place, *TRAIN, "--set", assignment)
        assert wrong.wait() == 2 and wrong.stderr.startswith(f"paceline: {line}")
        assert wrong.stderr.count("\n") == 1


def test_commands_that_read_no_data_work_without_the_source_file(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place / "run")  # a folder without ./shapes.py
    assert config_of(".", load_source=False).run.data == "./shapes.py"
    assert config_of(".", [("flag", {"data": "digits"})]).run.data == "digits"
    with pytest.raises(UserError, match=r"shapes\.py': no such file"):
        config_of(".", trust=True)


def test_a_setting_for_another_source_is_rejected_in_an_error_that_names_that_source() -> None:
    panels = ("--config my.toml", {"data": "panels", "panels": "image,-"})
    for layers, line in (
        (
            [("flag", {"data": "photos"}), ("--set", {"degrade_noise": "3"})],
            "--set degrade_noise belongs to source 'degraded', but --data is 'photos'; leave it out",
        ),
        (
            [("flag", {"low_root": "small"})],
            "--low-root belongs to source 'degraded' or 'photos', but --data is 'digits'; leave it out",
        ),
        (
            [panels, ("flag", {"data": "npz"})],
            "--config my.toml panels belongs to source 'panels' or 'shards', but --data is 'npz'; leave it out",
        ),
        (
            [("flag", {"data": "degraded"}), ("--set", {"degrade_nois": "3"})],
            "--set: unknown setting 'degrade_nois'; did you mean 'degrade_noise'?",
        ),
        ([("--set", {"data": "photo"})], "unknown source 'photo'; did you mean 'photos'?"),
    ):
        assert rejected(*layers) == line


def test_a_resumed_run_may_change_the_test_folder_but_not_the_training_settings() -> None:
    given = {"data": "degraded", "test_root": "here", "degrade_seed": 1, "generator.lr": 0.1}
    kept = resolve("own", Recipe, [("--set", given)]).values()
    layers = [("--set", {"data": "degraded", "test_root": "there", "degrade_seed": 2})]
    now = resolve("own", Recipe, layers)
    assert changed_settings(kept, now) == ["degrade_seed: 1 → 2", "generator.lr: 0.1 → None"]


def test_the_last_data_argument_decides_which_source_settings_are_available() -> None:
    layers = [("recipe", {"data": "digits"}), ("file", {"degrade_blur": 2}), ("flag", {"data": "degraded"})]
    assert resolve("own", Recipe, layers).run.degrade_blur == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("lines", "line"),
    [
        ("class Settings:\n    noise: float = 1.0", UNFIT),
        ("class Settings(RunSettings):\n    noise: float = setting(1.0, 'of it')", UNFIT),
        ("@dataclass\nclass Settings(RunSettings):\n    noise: float = 1.0", "cannot be imported: TypeError"),
        (
            "@dataclass(frozen=True)\nclass Settings(RunSettings):\n    momentum: float = 1.0",
            "own.py': setting 'momentum' clashes with a setting in the recipe or its networks; rename it",
        ),
    ],
)
def test_invalid_source_settings_are_reported(lines: str, line: str, tmp_path: Path) -> None:
    assert re.search(line, rejected(("flag", {"data": source_file(tmp_path, lines)})))


def test_a_source_may_change_defaults_and_declare_settings_as_plain_fields(tmp_path: Path) -> None:
    lines = (
        "@dataclass(frozen=True)\nclass Settings(RunSettings):\n    size: int = setting(24, 'side')\n    plain: int = 5"
    )
    layers = [("flag", {"data": source_file(tmp_path, lines)}), ("--set", {"plain": "6"})]
    run_settings = resolve("own", Recipe, layers).run
    assert (run_settings.size, run_settings.plain) == (24, 6)  # type: ignore[attr-defined]


def test_photos_are_degraded_as_configured(tmp_path: Path) -> None:
    for number in range(10):
        image = np.full((20, 24, 3), 20 * number, dtype=np.uint8)
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    words = ("--data", "degraded", "--data-root", ".", "--crop", "16", "--images", "8", "--batch-size", "8")
    words += ("--set", "width=2", "--set", "depth=1", "--set", "degrade_noise=10", "--accelerator", "cpu")
    trained = run_fork(tmp_path, "train", "restoration", *words, "--out", "run")
    assert trained.wait() == 0, trained.stderr
    kept = (tmp_path / "run" / "config.toml").read_text()
    assert "degrade_noise = 10.0" in kept and 'low_root = ""' in kept
    packed = run_fork(tmp_path, "pack", ".", "packed", "--set", "degrade_noise=10")
    assert packed.wait() == 2
    assert "--set degrade_noise belongs to source 'degraded', but --data is 'photos'" in packed.stderr


def test_the_example_source_in_the_guide_accepts_its_own_setting(tmp_path: Path) -> None:
    section = GUIDE.read_text().partition("## Your own source")[2]
    (tmp_path / "my_source.py").write_text(section.partition("```python\n")[2].partition("```")[0])
    for split, count in (("train", 40), ("test", 8)):
        images = np.random.default_rng(0).integers(0, 256, (count, 8, 8, 1), dtype=np.uint8)
        np.savez(tmp_path / f"{split}.npz", images=images, labels=np.arange(count) % 10)
    words = ("--data", "./my_source.py", "--data-root", ".", "--set", "first=20", *SHORT)
    trained = run_fork(tmp_path, "train", "classification", *words, "--out", "run")
    assert trained.wait() == 0, trained.stderr
    assert "18 train, 8 test, 2 validation" in trained.stdout
