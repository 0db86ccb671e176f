"""Measure how long each `paceline` command takes to print its first line, and its longest silence after that.

    python benchmarks/first_line.py [--repeats 5] [--json FILE] [--only "plan;train"] [--stop-early]

Every command runs in a new process, without a terminal; stdout and stderr are both watched. The longest silence is the
longest time between two lines, or between the last line and the end of the command. Times depend on the machine and
its load, so compare two versions of Paceline on the same idle machine. With `--stop-early`, each command is killed
after its first line, so that only the time to the first line is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUN = "runs/first"
TRAIN = ("train", "classification", "--preset", "quick", "--epochs", "2")
COMMANDS: dict[str, tuple[str, ...]] = {
    "(no command)": (),
    "--help": ("--help",),
    "train --help": ("train", "--help"),
    "train": (*TRAIN, "--out", "{new}"),
    "train, 2 processes": (*TRAIN, "--devices", "2", "--accelerator", "cpu", "--out", "{new}"),
    "train, user error": ("train", "clasification"),
    "evaluate": ("evaluate", RUN),
    "predict": ("predict", RUN, "image.png"),
    "apply": ("apply", "runs/sr", "image.png", "--out", "{new}"),
    "sample": ("sample", "runs/sr", "--out", "{new}.png"),
    "measure": ("measure", "image.png", "image.png"),
    "export": ("export", RUN, "--out", "{new}.onnx"),
    "verify": ("verify", "classification", "--steps", "2", "--accelerator", "cpu"),
    "plan": ("plan", "classification", "--preset", "quick", "--devices", "2", "--accelerator", "cpu"),
    "compare": ("compare", "classification", "--preset", "quick", "--epochs", "1", "--devices", "1",
                "--strategies", "single", "--accelerator", "cpu", "--out", "{new}"),
    "pack": ("pack", "digits", "{new}"),
    "doctor": ("doctor",),
    "settings": ("settings",),
    "settings classification": ("settings", "classification"),
    "new": ("new", "recipe", "{name}"),
    "launch torchrun": ("launch", "torchrun", "classification", "--hosts", "a,b", "--devices", "2"),
}  # fmt: skip


def first_line_and_silence(words: list[str], folder: Path, *, stop_early: bool) -> tuple[float, float, float]:
    """Run a command; return the seconds until its first line, its longest silence and its duration."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    times = []
    with selectors.DefaultSelector() as selector:
        for stream in (process.stdout, process.stderr):
            assert stream
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                if os.read(key.fd, 65536):
                    times.append(time.perf_counter() - began)
                    if stop_early:
                        os.killpg(process.pid, signal.SIGKILL)
                else:
                    selector.unregister(key.fileobj)
    process.wait()
    ended = time.perf_counter() - began
    if not times:
        return ended, ended, ended
    return times[0], max(b - a for a, b in zip(times, [*times[1:], ended], strict=True)), ended


def prepare(folder: Path, chosen: list[str]) -> None:
    """Train the models that the other commands use."""
    from PIL import Image

    Image.new("RGB", (32, 32), "grey").save(folder / "image.png")
    if not any(RUN in COMMANDS[name] or "runs/sr" in COMMANDS[name] for name in chosen):
        return
    for words in ((*TRAIN, "--out", RUN), ("train", "super_resolution", "--preset", "quick", "--images", "64",
                                           "--out", "runs/sr")):  # fmt: skip
        subprocess.run([sys.executable, "-m", "paceline", *words], cwd=folder, check=True, capture_output=True)


def main() -> None:
    """Measure all commands and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="names of commands, separated by semicolons (default: all)")
    parser.add_argument("--json", default="", help="also write all measurements to this file")
    parser.add_argument("--stop-early", action="store_true", help="end each command after its first line")
    options = parser.parse_args()
    chosen = options.only.split(";") if options.only else list(COMMANDS)
    found: dict[str, list[tuple[float, float, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, chosen)
        print(f"medians of {options.repeats}")
        print(f"{'command':<26}{'first line, s':>14}{'longest silence, s':>20}{'duration, s':>13}")
        for command in chosen:
            measured = []
            for number in range(options.repeats):
                new = f"new-{len(found)}-{number}"
                words = [word.format(new=new, name=new.replace("-", "_")) for word in COMMANDS[command]]
                measured.append(first_line_and_silence(words, folder, stop_early=options.stop_early))
            found[command] = measured
            first, silence, duration = (statistics.median(column) for column in zip(*measured, strict=True))
            print(f"{command:<26}{first:>14.2f}{silence:>20.2f}{duration:>13.2f}", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
