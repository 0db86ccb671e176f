"""Settings files from any editor are read completely: no line is ignored or misread."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.commands.configure import configure
from paceline.config.files import read_file
from paceline.core.errors import UserError


@pytest.mark.parametrize(
    ("name", "text", "settings"),
    [
        ("own.ini", "[training]\nwarmup = 50%\n", {"warmup": "50%"}),
        ("own.ini", "[DEFAULT]\nepochs = 3\n", {"epochs": "3"}),
        ("own.ini", "[generator]\nlr = 0.3\n[discriminator]\nlr = 0.3\n", {"lr": "0.3"}),
        ("own.toml", 'epochs = "3"\n', {"epochs": "3"}),
    ],
)
def test_every_line_of_a_settings_file_is_read(tmp_path: Path, name: str, text: str, settings: dict[str, str]) -> None:
    for encoding in ("utf-8", "utf-8-sig"):  # with and without a byte order mark
        (tmp_path / name).write_text(text, encoding=encoding)
        assert read_file(str(tmp_path / name)) == settings


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.ini", "[g]\nlr = 0.3\n[d]\nlr = 0.2\n", r"a\.ini: lr is 0\.3 in \[g\] and 0\.2 in \[d\], .*TOML"),
        ("a.yaml", "lr: 0.1\n", r"a\.yaml: .*; use a TOML or INI file$"),
        ("a.toml", "epochs = 3\n[provenance]\nformat = 1\n", r"run format 1, .*: copy the settings that you need into"),
    ],
)
def test_a_file_that_cannot_be_read_is_reported_with_what_to_do(
    tmp_path: Path, name: str, text: str, line: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=line):
        read_file(str(tmp_path / name))
    with pytest.raises(UserError, match=r": a folder; use a TOML or INI file, such as the config\.toml in a run"):
        read_file(str(tmp_path))


@pytest.mark.parametrize("text", ['diffaugment = "color"', 'preset = "cifar10_reference"'])
def test_settings_of_another_recipe_are_reported_with_the_name_of_that_recipe(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f'recipe = "dcgan"\n{text}\n')
    with pytest.raises(UserError, match=r"^--config .*config\.toml: is for recipe 'dcgan' .*; use recipe 'dcgan', or"):
        configure("classification", {}, config_file=str(file))


def test_a_file_of_another_recipe_is_accepted_if_its_settings_fit(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('recipe = "dcgan"\nepochs = 3\n')
    assert configure("classification", {}, config_file=str(file)).run.epochs == 3
    with pytest.raises(UserError, match=r"^--set: unknown setting 'epocs'; did you mean 'epochs'"):
        configure("classification", {}, config_file=str(file), assignments=["epocs=3"])


def test_an_empty_preset_on_the_command_line_overrides_the_preset_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('preset = "quick"\nlr = 0.3\n')
    without = configure("classification", {}).recipe
    assert configure("classification", {}, config_file=str(file)).recipe != without
    for flags, assignments in (({"preset": ""}, []), ({}, ["preset="])):
        config = configure("classification", flags, config_file=str(file), assignments=assignments)
        assert config.run.preset == "" and config.recipe == without and config.learner.lr == 0.3
