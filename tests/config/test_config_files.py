"""Settings files from any editor are read completely: no line is ignored or misread."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.commands.configure import configure
from paceline.config.files import read_file
from paceline.core.errors import UserError


def test_a_percent_sign_in_an_ini_file_is_part_of_the_value(tmp_path: Path) -> None:
    file = tmp_path / "own.ini"
    file.write_text("[training]\nwarmup = 50%\n")
    assert read_file(str(file)) == {"warmup": "50%"}


def test_the_section_default_of_an_ini_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "own.ini"
    file.write_text("[DEFAULT]\nepochs = 3\n")
    assert read_file(str(file)) == {"epochs": "3"}


def test_different_values_in_two_sections_of_an_ini_file_are_rejected(tmp_path: Path) -> None:
    file = tmp_path / "own.ini"
    file.write_text("[generator]\nlr = 0.3\n[discriminator]\nlr = 0.2\n")
    with pytest.raises(UserError, match=r"own\.ini: lr is 0\.3 in \[generator\] and 0\.2 in \[discriminator\], .*TOML"):
        read_file(str(file))
    file.write_text("[generator]\nlr = 0.3\n[discriminator]\nlr = 0.3\n")
    assert read_file(str(file)) == {"lr": "0.3"}


def test_a_file_in_another_format_is_reported_with_the_formats_to_use(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("lr: 0.1\n")
    with pytest.raises(UserError, match=r"own\.yaml: .*; use a TOML or INI file$"):
        read_file(str(file))


@pytest.mark.parametrize(("name", "text"), [("own.toml", 'epochs = "3"\n'), ("own.ini", "[a]\nepochs = 3\n")])
def test_a_byte_order_mark_is_ignored(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8-sig")
    assert read_file(str(file)) == {"epochs": "3"}


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


def test_a_folder_is_reported_with_the_file_to_use(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r": a folder; use a TOML or INI file, such as the config\.toml in a run"):
        read_file(str(tmp_path))


def test_a_file_of_another_format_is_reported_with_a_remedy_that_works(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("epochs = 3\n[provenance]\nformat = 1\n")
    with pytest.raises(UserError, match=r"run format 1, .*: copy the settings that you need into a new file, or use"):
        read_file(str(file))


def test_an_empty_preset_on_the_command_line_overrides_the_preset_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('preset = "quick"\nlr = 0.3\n')
    without = configure("classification", {}).recipe
    assert configure("classification", {}, config_file=str(file)).recipe != without
    for flags, assignments in (({"preset": ""}, []), ({}, ["preset="])):
        config = configure("classification", flags, config_file=str(file), assignments=assignments)
        assert config.run.preset == "" and config.recipe == without and config.learner.lr == 0.3
