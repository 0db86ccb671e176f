"""Malicious run folders. Commands must end quickly and must not execute code from them or change other files.

`write_hostile_runs` copies a good run once per attack. A test runs commands on the copies and checks that no canary
file exists and that no file outside the run folders has changed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

CANARY = "canary"  # name of a file that exists only if code from a run folder was executed
ESCAPES = "\x1b]0;owned\x07\x1b[2J\r\u202etxt\ue000a\ue001d\ue002<script>alert(1)</script>"
SPECIAL = ("config.toml", "metrics.jsonl", "status.json", "protocols.json", "data_spec.json", "mirror.json", ".lock")
WRONG: tuple[Any, ...] = (None, [], {}, "text", 10**400, -1, 1e308, True)


@dataclass(frozen=True)
class HostileRun:
    """One attack: its name, its run folder, and files outside the folder that must not change."""

    name: str
    path: Path
    victims: tuple[Path, ...] = ()


def write_hostile_runs(folder: Path, good_run: Path) -> list[HostileRun]:
    """Write one hostile copy of a good run per attack; the folder must be new or empty."""
    victim = folder / "victim"
    victim.mkdir(parents=True)
    (victim / "precious.txt").write_text("mine\n")
    found = []
    attacks = (_code(folder), _links(victim), _not_files(), _bombs(), _checkpoints(), _values())
    for name, spoil in chain(*attacks):
        run = folder / name
        shutil.copytree(good_run, run)
        spoil(run)
        found.append(HostileRun(name, run, (victim, victim / "precious.txt")))
    return found


Spoil = Callable[[Path], object]


def _code(folder: Path) -> Iterator[tuple[str, Spoil]]:
    def name_code(setting: str, run: Path) -> None:
        file = run / "x.py"
        file.write_text(f"open({str(folder / CANARY)!r}, 'w').close()\n")
        set_line(run, setting, str(file))

    for setting in ("recipe", "data", "loader", "strategy", "loggers"):
        yield f"code-{setting}", lambda run, setting=setting: name_code(setting, run)
    yield "code-sha256", lambda run: set_line(run, "inception-sha256", "0" * 64)


def _links(victim: Path) -> Iterator[tuple[str, Spoil]]:
    for name in ("checkpoints", "logs", "samples", "tensorboard", ".mirror", ".restoring"):
        yield f"link-folder-{name.strip('.')}", lambda run, name=name: link(run / name, victim)
    for name in (*SPECIAL, "logs/rank-0.txt", ".0123456789abcdef.writing"):
        plain = name.strip(".").replace("/", "-").replace(".", "-")
        yield f"link-file-{plain}", lambda run, name=name: link(run / name, victim / "precious.txt")


def _not_files() -> Iterator[tuple[str, Spoil]]:
    for name in SPECIAL:
        plain = name.strip(".").replace(".", "-")
        yield f"pipe-{plain}", lambda run, name=name: pipe(run / name)
        yield f"zero-{plain}", lambda run, name=name: link(run / name, Path("/dev/zero"))
    for name in ("manifest.json", "state.json", "weights.safetensors"):
        yield f"pipe-checkpoint-{name}", lambda run, name=name: pipe(newest(run) / name)


def _bombs() -> Iterator[tuple[str, Spoil]]:
    texts = {
        "dotted": "a." * 30_000 + "a = 1\n",
        "nested": "x = " + "[" * 100_000,
        "number": f"x = {'9' * 5000}\n",
        "large": "#" * 10**7,
        "empty": "",
    }
    for name, text in texts.items():
        yield f"toml-{name}", lambda run, text=text: (run / "config.toml").write_text(text)
    lines = {
        "nested": "[" * 10**6,
        "number": '{"images": ' + "9" * 5000 + "}",
        "not-finite": '{"images": 1e999, "since": NaN, "state": "running"}',
        "other": '"text"',
    }
    for name, text in lines.items():
        for file in ("status.json", "data_spec.json", "protocols.json", "metrics.jsonl"):
            plain = file.partition(".")[0]
            yield f"json-{name}-{plain}", lambda run, file=file, text=text: (run / file).write_text(text)
    line = '{"images": 1, "seconds": 1.0, "time": 1.0, "a/b": 1.0}\n'
    odd = '{"images": 1e999}\n[]\nnull\n{"images": "x", "validation/top1": {}}\n' + "[" * 100_000 + "\n"
    yield "metrics-odd", lambda run: (run / "metrics.jsonl").write_text(odd)
    yield "metrics-many-lines", lambda run: (run / "metrics.jsonl").write_text(line * 10**6)
    yield "metrics-long-line", lambda run: (run / "metrics.jsonl").write_text("x" * 10**7 + "\n" + line)


def _checkpoints() -> Iterator[tuple[str, Spoil]]:
    def newer(run: Path) -> None:
        shutil.copytree(newest(run), run / "checkpoints" / "000000999999")

    def pipe_in_newer(run: Path) -> None:
        (run / "checkpoints" / "000000999999").mkdir()
        os.mkfifo(run / "checkpoints" / "000000999999" / "manifest.json")

    def header(run: Path) -> None:
        (newest(run) / "weights.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")

    def manifest(run: Path, name: str) -> None:
        file = newest(run) / "manifest.json"
        content = json.loads(file.read_text())
        content["sha256"][name] = content["sha256"].pop("state.json")
        file.write_text(json.dumps(content))

    yield "old-checkpoint-under-a-newer-name", newer
    yield "pipe-in-a-newer-checkpoint", pipe_in_newer
    yield "safetensors-header", header
    yield "manifest-absolute", lambda run: manifest(run, "/etc/hostname")
    yield "manifest-parent", lambda run: manifest(run, "../../../victim/precious.txt")
    yield "manifest-empty", lambda run: (newest(run) / "manifest.json").write_text("{}")
    yield "no-config", lambda run: (run / "config.toml").unlink()
    yield "checkpoint-name", lambda run: (run / "checkpoints" / "²").mkdir()


def _values() -> Iterator[tuple[str, Spoil]]:
    for number, value in enumerate(WRONG):
        spec = {"channels": value, "height": value, "width": value, "num_classes": value, "class_names": value}
        text = json.dumps(spec | {"flip_allowed": value, "scale": value, "panels": value})
        yield f"spec-{number}", lambda run, text=text: (run / "data_spec.json").write_text(text)
        status = json.dumps(dict.fromkeys(("state", "since", "total_images", "reason", "host", "pid"), value))
        yield f"status-{number}", lambda run, text=status: (run / "status.json").write_text(text)
    for setting in ("data_root", "precision", "out", "seed", "images"):
        yield f"escapes-{setting}", lambda run, setting=setting: set_line(run, setting, ESCAPES)
    for setting in ("width", "batch_size", "data", "lr"):
        yield f"wrong-{setting}", lambda run, setting=setting: set_line(run, setting, None)


def set_line(run: Path, setting: str, value: str | None) -> None:
    """Change a setting in a run's config.toml; the value None writes an invalid value."""
    settings, table, others = (run / "config.toml").read_text().partition("\n[")
    kept = [line for line in settings.splitlines() if line.partition(" = ")[0] != setting]
    line = f"{setting} = {'[[1], {a = 1}]' if value is None else json.dumps(value)}"
    (run / "config.toml").write_text("\n".join([*kept, line]) + table + others)


def newest(run: Path) -> Path:
    """Return the folder of a run's newest checkpoint."""
    return sorted(path for path in (run / "checkpoints").iterdir() if path.name.isascii() and path.name.isdigit())[-1]


def link(path: Path, target: Path) -> None:
    """Replace a file or folder with a link."""
    remove(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def pipe(path: Path) -> None:
    """Replace a file with a pipe."""
    remove(path)
    os.mkfifo(path)


def remove(path: Path) -> None:
    """Remove a file or folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
