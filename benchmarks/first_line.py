"""Measure how long each `paceline` command takes to print its first line, and its longest silence.

    python benchmarks/first_line.py [--repeats 5] [--whole 2] [--only "plan;train"] [--json FILE]

Each command runs in new processes. For the first line, the command runs `--repeats` times with its output in a pipe and
is killed after its first line. For the silences, the command runs to its end `--whole` times in a pipe and `--whole`
times on a pseudo-terminal of 80×24 characters. A silence is the time between two outputs, between the start and the
first output, or between the last output and the end. On a terminal, a moving bar or counter is output, too. The
activity that precedes the longest silence is printed below the table. Times depend on the machine and its load, so run
this on an idle machine. Without `--whole` (`--whole 0`), only the first line is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

RUN, MODEL = "runs/first", "runs/sr"
TRAIN = ("train", "classification", "--preset", "quick", "--epochs", "2")
MAX_SECONDS = 600.0  # a command that takes longer is killed and reported as failed
CONTROL_CODES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
COMMANDS: dict[str, tuple[str, ...]] = {
    "(no command)": (),
    "--help": ("--help",),
    "train --help": ("train", "--help"),
    "train": (*TRAIN, "--out", "{new}"),
    "train, 2 processes": (*TRAIN, "--devices", "2", "--accelerator", "cpu", "--out", "{new}"),
    "train, user error": ("train", "clasification"),
    "evaluate": ("evaluate", RUN),
    "evaluate, 2 processes": ("evaluate", RUN, "--devices", "2", "--accelerator", "cpu"),
    "predict": ("predict", RUN, "image.png"),
    "apply": ("apply", MODEL, "image.png", "--out", "{new}"),
    "sample": ("sample", MODEL, "--out", "{new}.png"),
    "measure": ("measure", "image.png", "image.png"),
    "import": ("import", "weights.pth", "--recipe", "esrgan", "--out", "{new}.safetensors"),
    "export": ("export", RUN, "--out", "{new}.onnx"),
    "verify": ("verify", "classification", "--steps", "2", "--accelerator", "cpu"),
    "plan": ("plan", "classification", "--preset", "quick", "--devices", "2", "--accelerator", "cpu"),
    "compare": ("compare", "classification", "--preset", "quick", "--epochs", "1", "--devices", "2",
                "--accelerator", "cpu", "--out", "{new}"),
    "compare, finished runs": ("compare", RUN, "runs/second", "--out", "{new}"),
    "pack": ("pack", "digits", "{new}"),
    "doctor": ("doctor",),
    "doctor --self-test": ("doctor", "--self-test"),
    "settings": ("settings",),
    "settings classification": ("settings", "classification"),
    "new": ("new", "recipe", "{name}"),
    "launch torchrun": ("launch", "torchrun", "classification", "--hosts", "a,b", "--devices", "2"),
    "board": ("board", "runs", "--port", "0"),
}  # fmt: skip
SERVERS = ("board",)  # commands that do not end; they are stopped after their first line
MAY_FAIL = {"train, user error": 2}  # exit codes other than 0 that are expected


@dataclass
class Watched:
    """What a command printed, and when."""

    first: float | None = None  # seconds until the first output
    silence: float = 0.0
    before_silence: str = "start of the command"
    seconds: float = 0.0
    code: int = 0
    text: str = field(default="", repr=False)


def watch(words: Sequence[str], folder: Path, *, terminal: bool = False, stop_early: bool = False) -> Watched:
    """Run a command and record when it prints."""
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment |= {"TERM": "xterm-256color", "XDG_CACHE_HOME": str(folder / "cache")}
    reader, writer = pty.openpty() if terminal else os.pipe()
    if terminal:
        os.set_blocking(reader, True)
        subprocess.run(["stty", "rows", "24", "cols", "80"], stdin=writer, check=False)
    found, began = Watched(), time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", *words],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=writer,
        start_new_session=True,
        env=environment,
    )
    os.close(writer)
    last = began
    while time.perf_counter() - began < MAX_SECONDS:
        if not select.select([reader], [], [], 1.0)[0]:
            continue
        try:
            piece = os.read(reader, 65536)
        except OSError:  # the last process has closed the pseudo-terminal
            piece = b""
        now = time.perf_counter()
        if now - last > found.silence:
            found.silence, found.before_silence = now - last, last_line(found.text) or "start of the command"
        last = now
        if not piece:
            break
        found.first = found.first if found.first is not None else now - began
        found.text += piece.decode(errors="replace")
        if stop_early:
            break
    if process.poll() is None and (stop_early or time.perf_counter() - began >= MAX_SECONDS):
        os.killpg(process.pid, signal.SIGKILL)
    found.code = process.wait()
    os.close(reader)
    found.seconds = time.perf_counter() - began
    return found


def last_line(text: str) -> str:
    """Return the last line that a terminal would show."""
    lines = [line.rpartition("\r")[2] for line in CONTROL_CODES.sub("", text).replace("\r\n", "\n").split("\n")]
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def prepare(folder: Path, chosen: Sequence[str]) -> None:
    """Write the files and train the models that the chosen commands use."""
    words = {word for name in chosen for word in COMMANDS[name]}
    runs = {RUN: TRAIN, "runs/second": (*TRAIN, "--seed", "1")}
    runs[MODEL] = ("train", "super_resolution", "--preset", "quick", "--images", "64")
    if "image.png" in words:
        from PIL import Image

        Image.new("RGB", (32, 32), "grey").save(folder / "image.png")
    if "weights.pth" in words:
        import torch

        from paceline.models.esrgan import RRDBNet

        torch.save(RRDBNet(width=8, num_blocks=1, growth=4).state_dict(), folder / "weights.pth")
    words |= {RUN} if "runs" in words else set()  # the board shows at least one run
    for out in (name for name in runs if name in words):
        print(f"preparing {out} …", file=sys.stderr, flush=True)
        made = watch((*runs[out], "--out", out), folder)
        if made.code:
            sys.exit(f"the benchmark cannot be prepared: exit code {made.code}\n{made.text}")


def measure(command: str, folder: Path, repeats: int, whole: int) -> dict[str, list[Watched]]:
    """Run a command several times: until its first line, to its end in a pipe, and to its end on a terminal."""
    found: dict[str, list[Watched]] = {"first": [], "pipe": [], "terminal": []}
    kinds = ["first"] * repeats + ["pipe", "terminal"] * (0 if command in SERVERS else whole)
    for number, kind in enumerate(kinds):
        new = f"new{len(list(folder.iterdir()))}_{number}"
        words = [word.format(new=new, name=new) for word in COMMANDS[command]]
        watched = watch(words, folder, terminal=kind == "terminal", stop_early=kind == "first")
        if kind != "first" and watched.code != MAY_FAIL.get(command, 0):
            sys.exit(f"paceline {' '.join(words)}: exit code {watched.code}\n{watched.text}")
        found[kind].append(watched)
    return found


def row(command: str, found: dict[str, list[Watched]]) -> str:
    """Return one line of the table."""
    firsts = [one.first if one.first is not None else one.seconds for one in found["first"]]
    cells = [f"{statistics.median(firsts):.2f} ({min(firsts):.2f}–{max(firsts):.2f})" if firsts else "–"]
    for kind in ("pipe", "terminal"):
        cells.append(f"{max(one.silence for one in found[kind]):.1f}" if found[kind] else "–")
    seconds = [one.seconds for kind in ("pipe", "terminal") for one in found[kind]]
    cells.append(f"{statistics.median(seconds):.1f}" if seconds else "–")
    return f"{command:<25}{cells[0]:>20}{cells[1]:>10}{cells[2]:>13}{cells[3]:>13}"


def main() -> None:
    """Measure all commands and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="runs for the first line")
    parser.add_argument("--whole", type=int, default=2, help="runs to the end, in a pipe and on a terminal each")
    parser.add_argument("--only", default="", help="names of commands, separated by semicolons (default: all)")
    parser.add_argument("--json", default="", help="also write all measurements to this file")
    options = parser.parse_args()
    chosen = options.only.split(";") if options.only else list(COMMANDS)
    if unknown := [name for name in chosen if name not in COMMANDS]:
        parser.error(f"--only: unknown: {', '.join(unknown)}; choose from: {'; '.join(COMMANDS)}")
    load = f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    measured: dict[str, dict[str, list[Watched]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, chosen)
        print(f"seconds; {load} before the start; first line: median of {options.repeats} (min–max)")
        print(f"{'':<25}{'':>20}{'longest silence in a':>23}{'median':>13}")
        print(f"{'command':<25}{'first line':>20}{'pipe':>10}{'terminal':>13}{'duration':>13}", flush=True)
        for command in chosen:
            measured[command] = measure(command, folder, options.repeats, options.whole)
            print(row(command, measured[command]), flush=True)
    print()
    for command, found in measured.items():
        for kind in ("pipe", "terminal"):
            worst = max(found[kind], key=lambda one: one.silence, default=None)
            if worst and worst.silence > 2:
                print(f"{command}: {worst.silence:.1f} s silent ({kind}) after: {worst.before_silence}")
    if options.json:
        content = {
            name: {kind: [asdict(one) for one in runs] for kind, runs in found.items()}
            for name, found in measured.items()
        }
        Path(options.json).write_text(json.dumps({"load": load, "commands": content}, indent=1))


if __name__ == "__main__":
    main()
