"""Names, settings and messages cannot inject control characters or markup into the terminal or reports."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from running import run_fork

from paceline.cli.app import run
from paceline.core.terminal import literal, open_screen
from paceline.core.text import printable, printable_lines

HOSTILE = "\x1b]0;owned\x07\x1b[2J\nline\r\u202etxt\u2066\x9b1m\udcff"


def test_control_characters_are_escaped_and_other_text_is_kept() -> None:
    assert printable("naïve 画像 🙂 Ω ×4") == "naïve 画像 🙂 Ω ×4"
    assert printable(HOSTILE) == r"\x1b]0;owned\x07\x1b[2J\x0aline\x0d\u202etxt\u2066\x9b1m\xff"
    assert printable_lines("a\tb\n\x1bc") == "a\tb\n\\x1bc"


def test_messages_and_tables_cannot_send_control_codes_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["evaluate", f"runs/{HOSTILE}"]) == 2
    printed = capsys.readouterr().err
    assert printed.endswith("\n") and printable(printed[:-1]) == printed[:-1]
    shown = io.StringIO()
    screen = open_screen(file=shown, soft_wrap=True)
    screen.print(HOSTILE)
    screen.print(literal(HOSTILE))
    assert all(printable(line) == line for line in shown.getvalue().split("\n"))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_name_can_be_printed_in_any_encoding(encoding: str, tmp_path: Path) -> None:
    name = os.fsdecode(b"runs-\xff-\xe7\x94\xbb")
    environment = os.environ | {"PYTHONIOENCODING": encoding, "LANG": "C", "LC_ALL": "C"}
    command = [sys.executable, "-m", "paceline", "settings", f"./{name}.py"]
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, timeout=100)
    assert ended.returncode == 2 and ended.stderr.count(b"\n") == 1, ended.stderr
    assert b"Traceback" not in ended.stderr and b"runs-" in ended.stderr


def test_a_report_shows_hostile_settings_as_text(tmp_path: Path) -> None:
    trained = run_fork(tmp_path, "train", "classification", "--images", "64", "--set", "width=8", "--out", "run")
    assert trained.wait() == 0, trained.stderr
    config = tmp_path / "run/config.toml"
    text = config.read_text()
    values = ["\ue000runs::x\ue001d\ue002", "\ue000", "<script>alert(1)</script>", "<img src=x onerror=alert(1)>"]
    root = json.dumps(" ".join([*values, "\x1b[2J\u202e"]), ensure_ascii=True)
    config.write_text(text.replace('data_root = "', f"data_root = {root} # ", 1))
    assert config.read_text() != text
    shutil.copytree(tmp_path / "run", tmp_path / "<img src=x>\ue000")
    for folder in ("run", "<img src=x>\ue000"):
        compared = run_fork(tmp_path, "compare", folder, "--out", "report")
        assert compared.wait() == 0, compared.stderr
        for file in ("report.md", "report.html"):
            made = (tmp_path / "report" / file).read_text()
            made = re.sub(
                r"^(```+).*?^\1$", "", made, flags=re.MULTILINE | re.DOTALL
            )  # code blocks are shown literally
            assert "<script>alert" not in made and "<img src=x" not in made and "\x1b" not in made
        shutil.rmtree(tmp_path / "report")
