"""A command reports slow activities on stderr, and its results alone on stdout."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.core import activity as reports
from paceline.core.activity import SHOWN, Counter, activity, counted
from paceline.core.printable import wrapped


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHOWN, "1")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(reports, "_reported", set())


def test_the_import_of_torch_is_reported_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import sys\nprint('importing', file=sys.stderr)\n")
    code = "from paceline.core.activity import show_activities; show_activities(); import json; import torch"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("", "loading PyTorch …\nimporting\n")


@pytest.mark.usefixtures("shown")
def test_an_activity_is_printed_once_and_only_by_rank_0(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    activity("reading")
    activity("reading")
    monkeypatch.setenv("RANK", "1")
    activity("writing")
    assert capsys.readouterr() == ("", "reading …\n")


def test_a_program_that_imports_paceline_sees_no_activities(capsys: pytest.CaptureFixture[str]) -> None:
    activity("reading")
    assert list(counted([1, 2], "reading", 2)) == [1, 2]
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("shown")
def test_without_a_terminal_a_counter_prints_a_plain_line_every_two_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with Counter("reading images", 12_000) as counter:
        for number in range(1, 6):
            clock[0] += 1
            counter.update(1000 * number)
    assert capsys.readouterr() == ("", "reading images: 2,000 of 12,000 …\nreading images: 4,000 of 12,000 …\n")


@pytest.mark.usefixtures("shown")
def test_on_a_terminal_a_counter_is_updated_in_place_and_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    list(counted(range(3), "measuring", 3))
    printed = terminal.getvalue()
    assert "measuring: 1 of 3 …" in printed and "\n" not in printed and printed.endswith("\r\x1b[2K")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "stderr", Terminal())
    list(counted(range(3), "measuring", 3))
    assert "\r" not in sys.stderr.getvalue()  # type: ignore[attr-defined]


def test_a_long_line_is_broken_between_words_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    line = "one of several devices (2 processes in parallel), excluding communication: 64: 12.3 ms"
    assert wrapped(line, io.StringIO()) == line
    lines = wrapped(line, Terminal()).split("\n")
    assert max(map(len, lines)) <= 40 and " ".join(word for part in lines for word in part.split()) == line


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", b"ok: a -> b <= 1e-9 ... \\u753b"), ("utf-8", "✓".encode())])
def test_symbols_have_a_replacement_in_other_encodings(encoding: str, shown: bytes) -> None:
    code = "from paceline.core.printable import print_any_text; print_any_text(); print('✓ a → b ≤ 1e-9 … 画')"
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=60)
    assert done.returncode == 0 and shown in done.stdout
