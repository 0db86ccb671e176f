"""Settings files from any editor are read completely: no line is ignored or misread."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config.files import read_file


def test_a_percent_sign_in_an_ini_file_is_part_of_the_value(tmp_path: Path) -> None:
    file = tmp_path / "own.ini"
    file.write_text("[training]\nwarmup = 50%\n")
    assert read_file(str(file)) == {"warmup": "50%"}


def test_the_section_default_of_an_ini_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "own.ini"
    file.write_text("[DEFAULT]\nepochs = 3\n")
    assert read_file(str(file)) == {"epochs": "3"}


@pytest.mark.parametrize(("name", "text"), [("own.toml", 'epochs = "3"\n'), ("own.ini", "[a]\nepochs = 3\n")])
def test_a_byte_order_mark_is_ignored(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8-sig")
    assert read_file(str(file)) == {"epochs": "3"}
