"""Output on a terminal, output without a terminal, and the logs in the run folder."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from rich.table import Table
from running import TIMEOUT_SECONDS, run_fork

from paceline.core.terminal import open_screen
from paceline.runs import terminal as display_module
from paceline.runs.terminal import Display, log_output

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
DETECTED = ["validation top1 93.1", "terminal True utf-8 1"]

TRAINING = """
import sys, time
from pathlib import Path
from paceline.runs import terminal as module
from paceline.runs.terminal import log_output
module._TICK_SECONDS = 1e6  # a slow machine must not print more lines
module._MAX_LINE_SECONDS = 0  # print every line
log_output(Path(sys.argv[1]), 0)
with module.Display(45_000, 0, "tiny on digits", True, 10_000) as display:
    for images in range(6400, 45_000, 6400):
        time.sleep(0.02)
        display.update(images, {"classifier/loss": 1.2345, "gpu/power_watts": 300, "time/data_wait": 0.003})
        print("\\x1b[31mprinted\\x1b[0m at", images)
        print("warned at", images, file=sys.stderr)
    display.line("validation top1 93.1")
    ENDING
"""


class Terminal:
    """A program that runs in a pseudo-terminal."""

    def __init__(self, code: str, *arguments: str, columns: int = 100, **streams: int) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        environment["TERM"] = "xterm-256color"
        command = [sys.executable, "-c", code, *arguments]
        channels = {"stdin": slave, "stdout": slave, "stderr": slave} | streams
        self.process = subprocess.Popen(command, **channels, env=environment, start_new_session=True)  # type: ignore[call-overload]
        os.close(slave)
        self.text, self.decoder = "", codecs.getincrementaldecoder("utf-8")()

    def read(self, until: str | None = None) -> str:
        """Read and return the output until a given text appears or the program ends."""
        while until is None or until not in self.text:
            try:
                piece = os.read(self.master, 65536)
            except OSError:  # the program closed its side of the terminal
                break
            self.text += self.decoder.decode(piece)  # a piece may end inside a character
        return self.text

    def end(self) -> int:
        self.read()
        os.close(self.master)
        return self.process.wait(timeout=TIMEOUT_SECONDS)


def kept(folder: Path, rank: int = 0) -> str:
    return (folder / "logs" / f"rank-{rank}.txt").read_text()


def test_the_progress_bar_is_below_the_printed_lines_and_not_in_the_log_file(tmp_path: Path) -> None:
    ending = 'print("terminal", sys.stdout.isatty(), sys.stdout.encoding, sys.stdout.fileno())'
    terminal = Terminal(TRAINING.replace("ENDING", ending), str(tmp_path))
    assert terminal.end() == 0 and "tiny on digits" in terminal.text and "power" not in terminal.text
    assert terminal.text.rindex(SHOW_CURSOR) > terminal.text.rindex(HIDE_CURSOR)
    printed = [word for i in range(6400, 45_000, 6400) for word in (f"printed at {i}", f"warned at {i}")]
    assert kept(tmp_path).splitlines() == ["tiny on digits", *printed, *DETECTED]
    screen = rendered(terminal.text)
    assert [line for line in screen if line.startswith(("printed", "warned"))] == printed
    assert screen[-5:-3] == DETECTED, "the program detects its terminal while the bar is shown"
    assert screen[-3].startswith("━") and screen[-3].endswith("100%")
    progress = r"[\d,]+ images/s  ETA 0:00  epoch 4.5/4.5  44,800/45,000 images  classifier/loss 1.234"
    assert re.match(progress, screen[-2])


@pytest.mark.parametrize("ending", ["raise ValueError('boom')", "time.sleep(3600)"])
def test_an_exception_or_ctrl_c_restores_the_cursor_and_the_traceback_is_logged(tmp_path: Path, ending: str) -> None:
    with open(tmp_path / "errors.txt", "wb") as errors:
        terminal = Terminal(TRAINING.replace("ENDING", ending), str(tmp_path), stderr=errors.fileno())
        terminal.read(until="validation top1")
        terminal.process.send_signal(signal.SIGINT if "sleep" in ending else 0)
        assert terminal.end() != 0
    assert terminal.text.rindex(SHOW_CURSOR) > terminal.text.rindex(HIDE_CURSOR)
    assert "printed" in terminal.text and "warned" not in terminal.text and "Traceback" not in terminal.text
    redirected = (tmp_path / "errors.txt").read_text()
    assert redirected.startswith("warned at 6400\n") and "Traceback" in redirected
    assert "Traceback" in kept(tmp_path) and "\x1b" not in kept(tmp_path)


def test_the_progress_bar_fits_a_narrow_terminal(tmp_path: Path) -> None:
    terminal = Terminal(TRAINING.replace("ENDING", ""), str(tmp_path), columns=40)
    assert terminal.end() == 0
    screen = rendered(terminal.text)
    assert all(len(line) <= 40 for line in screen)
    assert "classifier/loss 1.234" in screen[-1] and "data wait 0.3%" in screen[-1], "values are not cut off"


def test_without_a_terminal_each_update_is_one_plain_line(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TRAINING.replace("ENDING", ""), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    first, second = [line for line in done.stdout.splitlines() if "images" in line][:2]
    progress = r"  [\d,]+ images/s  ETA [\d:]+  epoch {}/4.5  {}/45,000 images  classifier/loss 1.234  data wait 0.3%"
    assert re.fullmatch(progress.format("0.6", " 6,400"), first), first
    assert re.fullmatch(progress.format("1.3", "12,800"), second), second
    assert second in kept(tmp_path) and "warned at 6400" in done.stderr


class NoTicker:
    """Stands in for the background thread of a display, which would print lines of its own."""

    def __init__(self, seconds: float, call: Callable[[], None]) -> None:
        self.stop = lambda: None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which only the test changes."""
    clock = [0.0]
    for name in ("perf_counter", "monotonic"):
        monkeypatch.setattr(time, name, lambda: clock[0])
    monkeypatch.setattr(display_module, "Ticker", NoTicker)
    return clock


@pytest.mark.parametrize(("steps_per_second", "steps_per_update"), [(10, 1), (3, 2), (3, 29)])
def test_without_a_terminal_a_long_run_prints_its_lines_neither_in_pairs_nor_far_apart(
    capsys: pytest.CaptureFixture[str], clock: list[float], steps_per_second: int, steps_per_update: int
) -> None:
    printed_at, total = [], 3000 * steps_per_second - 3000 * steps_per_second % steps_per_update  # 50 minutes
    with Display(total, 0, "", True) as display:
        for images in range(1, total + 1):
            clock[0] = images / steps_per_second
            if images % steps_per_update == 0:
                display.update(images, {"classifier/loss": 1.0})
            display.tick(images)
            if printed := capsys.readouterr().out:
                printed_at += [clock[0]] * printed.count("\n")
                last = printed
    gaps = [(earlier, later - earlier) for earlier, later in pairwise(printed_at[:-1])]
    assert max(gap for _, gap in gaps) <= 10.5
    assert not [gap for earlier, gap in gaps if gap < min(earlier / 200, 5)]
    assert f"{total:,}/{total:,} images" in last, "the last step is always reported"


def test_a_disabled_display_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(10, 0, "title", False) as display:
        display.update(5, {"loss": 1.0})
        display.line("text")
    assert capsys.readouterr() == ("", "")


def test_the_rate_of_a_resumed_run_counts_only_images_since_the_resume(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    monkeypatch.setattr(display_module, "_MAX_LINE_SECONDS", 0.0)
    with Display(2_000_000, 1_000_000, "", True) as display:
        clock[0] = 2.0
        display.update(1_000_100, {})
        clock[0] = 3.0
        display.update(1_000_200, {"train/images_per_second": 40.0, "a/loss": float("nan")})
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("  50.0 images/s") and second.startswith("  40.0 images/s") and "a/loss nan" in second


def test_the_time_left_is_printed_in_hours_minutes_and_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    for images_left, eta in ((12, "0:12"), (75, "1:15"), (3600, "1:00:00"), (90_061, "25:01:01"), (10**9, "?")):
        with Display(images_left + 1, 0, "", True) as display:
            display.update(1, {"images_per_second": 1.0})
        assert f"  ETA {eta}  " in capsys.readouterr().out


def test_a_slow_step_is_reported_without_a_terminal_and_each_wait_is_longer_than_the_last(
    capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    printed = []
    with Display(100_000, 0, "", True, 1000) as display:
        for second in range(1, 41):
            clock[0] = float(second)
            display.tick(second)
            if capsys.readouterr().out:
                printed.append(second)
        display.busy("evaluating")
        assert not capsys.readouterr().out
        clock[0] += 60
        display.busy("evaluating on the validation split: 10 of 20 samples")
        assert capsys.readouterr().out == "  evaluating on the validation split: 10 of 20 samples\n"
    assert printed == [2, 6, 14, 24, 34]


WAITING = """
import sys, time
from pathlib import Path
from paceline.core import terminal as ticker
from paceline.runs import terminal as module
from paceline.runs.terminal import log_output
module._TICK_SECONDS, module._STILL_SECONDS, ticker.FIRST_SECONDS, ticker.MAX_SECONDS = 0.01, 0.02, 0.05, 0.05
ticks = [0.0]  # the time at which the last complete call began

def counted(seconds, call):
    def tick():
        began = time.perf_counter()
        call()
        ticks.append(began)
    return ticker.Ticker(seconds, tick)

def wait():
    until = time.perf_counter() + 0.1
    while ticks[-1] < until:
        time.sleep(0.01)

module.Ticker = counted
log_output(Path(sys.argv[1]), 0)
with module.Display(1000, 0, "", True, 100) as display:
    with display.during("sample images"):
        wait()
    wait()
    display.update(500, {"classifier/loss": 1.0})
    wait()
    display.busy("evaluating on the validation split: 1 of 2 samples")
    wait()
"""


def test_the_time_of_a_long_step_or_evaluation_is_shown_while_it_lasts(tmp_path: Path) -> None:
    terminal = Terminal(WAITING, str(tmp_path))
    assert terminal.end() == 0
    evaluating = "evaluating on the validation split: 1 of 2 samples"
    for text in ("sample images", "first step", "current step", evaluating):
        assert re.search(rf"{text}: \d+:\d\d", terminal.text), text
    screen = rendered(terminal.text)
    assert re.match(r"[\d,.]+ images/s  ETA .* 500/1,000 images  classifier/loss 1.000", screen[-1])
    assert kept(tmp_path) == "", "frames are not logged"
    command = [sys.executable, "-c", WAITING, str(tmp_path)]
    piped = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert re.search(r"^  epoch 0\.0/10  sample images: \d+:\d\d$", piped.stdout, re.MULTILINE)


def test_long_lines_are_wrapped_on_a_terminal_but_not_in_the_log_file(tmp_path: Path) -> None:
    line = "epoch 1.0/2  validation/loss 2.086  validation/top1 22.92%  validation/top5 69.44%  (best so far)"
    code = TRAINING.partition("with ")[0] + f"from paceline.core.text import print_line; print_line({line!r})"
    terminal = Terminal(code, str(tmp_path), columns=60)
    assert terminal.end() == 0
    assert terminal.text.splitlines() == [line[:58], f"  {line[60:]}"]
    assert kept(tmp_path) == f"{line}\n"


def test_the_logged_stream_behaves_like_the_terminal_stream(tmp_path: Path) -> None:
    before = sys.stdout
    with log_output(tmp_path, 0):
        assert sys.stdout is not before
        assert sys.stdout.isatty() == before.isatty() and sys.stdout.encoding == before.encoding
        sys.stdout.write("10%\r50%\r100%\r\nno end")
    assert sys.stdout is before
    with log_output(tmp_path, 0):
        print("after a resume")
    assert kept(tmp_path) == "100%\nno end\nafter a resume\n"


def test_ranks_other_than_0_print_only_to_their_log_file_even_from_c_code(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from paceline.runs.terminal import log_output
print("before")
log_output(Path(sys.argv[1]), 3)
print("printed")
print("warned", file=sys.stderr)
os.system("echo from another program")
os.kill(os.getpid(), signal.SIGKILL)
"""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=buffered)
    assert done.stdout == "before\n" and done.stderr == ""
    assert kept(tmp_path, 3) == "printed\nwarned\nfrom another program\n"


def rendered(text: str) -> list[str]:
    """Return the lines that a terminal would show at the end, once the display's escape codes are applied."""
    lines, row, column = [""], 0, 0
    position = 0
    while position < len(text):
        character = text[position]
        if character == "\x1b":
            stop = next(i for i in range(position + 2, len(text)) if text[i].isalpha())
            count, code = text[position + 2 : stop], text[stop]
            if code == "A":
                row -= int(count or 1)
            elif code == "K":
                lines[row] = ""
            position = stop
        elif character == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif character == "\r":
            column = 0
        else:
            lines[row] = lines[row][:column].ljust(column) + character + lines[row][column + 1 :]
            column += 1
        position += 1
    while lines and not lines[-1].strip():
        lines.pop()
    return [line.rstrip() for line in lines]


def test_names_with_special_characters_are_printed_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    name = "[bold]run[/bold] :warning: '.[dali]'"
    table = Table(title=name)
    table.add_column(name)
    table.add_row(name)
    screen = open_screen()
    screen.print(table)
    screen.print(name)
    assert capsys.readouterr().out.count(name) == 4


def test_escape_sequences_in_the_name_of_a_run_are_printed_escaped(tmp_path: Path, tiny: str) -> None:
    trained = run_fork(tmp_path, "train", tiny, "--images", "32", "--out", "run\x1b[31m")
    assert trained.wait() == 0 and "\x1b" not in trained.stdout + trained.stderr
    assert "run: run\\x1b[31m" in trained.stdout
    assert "\x1b" not in (tmp_path / "run\x1b[31m" / "logs" / "rank-0.txt").read_text()
