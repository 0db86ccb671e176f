"""`paceline settings` lists the settings for a recipe, for a source, and for all runs and networks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from paceline.cli.app import run
from paceline.config.settings import LearnerSettings, RunSettings
from paceline.core.registry import names

SOURCE = """
from dataclasses import dataclass

from paceline.data.source import Source
from paceline.config.settings import RunSettings, setting


class Mine(Source):
    @dataclass(frozen=True)
    class Settings(RunSettings):
        first: int = setting(7, "number of samples to use")
        plain: str = "no choices"
"""


def rows(printed: str) -> dict[str, list[str]]:
    """Return the lines of a listing, split into words, keyed by setting name."""
    lines = [line.split() for line in printed.splitlines() if line.startswith("  ")]
    return {words[0].removeprefix("--").replace("-", "_"): words[1:] for words in lines}


@pytest.mark.parametrize("recipe", names("recipe"))
def test_every_setting_is_listed_with_the_value_that_a_run_would_use(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["settings", recipe]) == 0
    listed = rows(capsys.readouterr().out)
    for group in (RunSettings, LearnerSettings):
        assert {f.name for f in fields(group)} <= listed.keys()


def test_the_listed_values_come_from_the_recipe_and_its_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["settings", "super_resolution"]) == 0
    plain = rows(capsys.readouterr().out)
    assert plain["num_blocks"][0] == "16" and plain["crop"][0] == "96" and "low_root" in plain
    assert plain["stage"][:2] == ["pretrain", "pretrain|adversarial|both:"]
    assert run(["settings", "super_resolution", "--preset", "quick", "--data", "pairs"]) == 0
    quick = rows(capsys.readouterr().out)
    assert quick["num_blocks"][0] == "3" and quick["data"][0] == "pairs" and "low_root" not in quick


def test_settings_of_a_user_source_are_listed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    assert run(["settings", "classification", "--data", "./mine.py"]) == 0
    listed = rows(capsys.readouterr().out)
    assert " ".join(listed["first"]) == "7 number of samples to use"
    assert " ".join(listed["plain"]) == "no choices"


def test_without_a_recipe_all_recipes_and_sources_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["settings"]) == 0
    listed = rows(capsys.readouterr().out)
    assert listed.keys() == {*names("recipe"), *names("source")}
    assert all(listed.values()), "an entry has no description"


def test_recipes_and_sources_are_listed_without_loading_pytorch() -> None:
    code = "import sys; from paceline.cli.app import run; sys.exit(run(['settings']) or 'torch' in sys.modules)"
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert listed.returncode == 0 and "classification" in listed.stdout, listed.stderr


def test_a_user_error_prints_one_line(rejected: Callable[..., str]) -> None:
    for words, line in (
        (["restoratoin"], "unknown recipe 'restoratoin'; did you mean 'restoration'?"),
        (["restoration", "--data", "pair"], "unknown source 'pair'; did you mean 'pairs'?"),
        (["super_resolution", "--preset", "quik"], "unknown preset 'quik'; did you mean 'quick'?"),
    ):
        assert rejected("settings", *words) == line
