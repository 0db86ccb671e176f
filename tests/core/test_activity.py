"""A command reports slow activities on stderr, and its results alone on stdout."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.core import terminal
from paceline.core.terminal import SHOWN, Counter, activity, counted
from paceline.core.text import wrapped


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show activities on a status line that no thread refreshes, neither during the test nor after it."""
    monkeypatch.setattr(terminal, "Ticker", lambda seconds, call: None)
    monkeypatch.setattr(terminal, "_status_line", terminal._StatusLine())
    monkeypatch.setenv(SHOWN, "1")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(terminal, "_reported", set())


def test_the_import_of_torch_is_reported_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import sys\nprint('importing', file=sys.stderr)\n")
    code = "from paceline.core.terminal import show_activities; show_activities(); import json; import torch"
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
def test_without_a_terminal_a_counter_prints_plain_lines_at_growing_intervals(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with Counter("reading images", 12_000) as counter:
        for number in range(1, 41):
            clock[0] += 1
            counter.update(100 * number)
    counts = ["200 of 12,000 (2%)", "600 of 12,000 (5%)", "1,400 of 12,000 (12%)"]
    counts += ["2,400 of 12,000 (20%)", "3,400 of 12,000 (28%)"]
    assert capsys.readouterr() == ("", "".join(f"reading images: {count} …\n" for count in counts))


READING = """
import sys, time, types
from paceline.core.terminal import activity, show_activities
from paceline.core import terminal
terminal.SECONDS_UNTIL_COUNTED, terminal.SECONDS_BETWEEN_TICKS = 0, 0.01
terminal.time = types.SimpleNamespace(monotonic=lambda: 0.0, sleep=time.sleep)  # on any machine
refresh, num_refreshes = terminal._StatusLine.refresh, 0

def counted(*arguments):
    global num_refreshes
    refresh(*arguments)
    num_refreshes += 1

def wait():
    until = num_refreshes + 2
    while num_refreshes < until:
        time.sleep(0.01)

terminal._StatusLine.refresh = counted
show_activities()
activity("reading")
"""
COUNTING = f"""
{READING}
wait()
sys.stderr.write("a ")
wait()
print("warning", file=sys.stderr)
wait()
print("a result")
wait()
"""


def test_on_a_terminal_the_seconds_of_an_activity_are_counted_until_a_result_is_printed() -> None:
    main, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm"}
    done = subprocess.run(
        [sys.executable, "-c", COUNTING], stdout=terminal, stderr=terminal, env=environment, timeout=60
    )
    os.close(terminal)
    printed = os.read(main, 65536).decode()
    os.close(main)
    seconds = "\r\x1b[2K  0:00"
    assert done.returncode == 0
    assert printed == f"reading …\r\n{seconds}\r\x1b[2Ka warning\r\n{seconds}\r\x1b[2Ka result\r\n"


def test_without_a_terminal_a_long_activity_is_reported_again() -> None:
    code = COUNTING.replace("\nshow_activities()", "\nterminal.MAX_SECONDS = 0; show_activities()")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    lines = done.stderr.splitlines()
    assert done.stdout == "a result\n" and {"reading …", "a warning", "still reading (0:00) …"} == set(lines)


def test_a_forked_process_can_print_while_its_parent_counts_the_seconds_of_an_activity() -> None:
    code = READING + (
        "import os\n"
        "for _ in range(50):\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        activity('computing')\n"
        "        print('printed', flush=True)\n"
        "        os._exit(0)\n"
        "    os.waitpid(child, 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["printed"] * 50


@pytest.mark.usefixtures("shown")
def test_on_a_terminal_a_counter_is_updated_in_place_and_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    list(counted(range(3), "measuring", 3))
    printed = terminal.getvalue()
    assert "measuring: 1 of 3 (33%)" in printed and "\n" not in printed and printed.endswith("\r\x1b[2K")
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
    code = "from paceline.core.text import print_any_text; print_any_text(); print('✓ a → b ≤ 1e-9 … 画')"
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=60)
    assert done.returncode == 0 and shown in done.stdout
