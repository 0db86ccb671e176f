"""Create regular and unusual run folders, and files outside these folders that the board must not read."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from PIL import Image

ODD_NAMES = [
    "with spaces",
    'it\'s "quoted"',
    "$(touch pwned)",
    "<img src=x onerror=alert(1)>",
    "naïve-&amp;-✓",
    "a..b",
]
SECRET = "hunter2secret"
OUTSIDE = "content outside of the folder"


def line(images: int, **values: float) -> str:
    """Return one line for a metrics file. Two underscores in a keyword become a slash."""
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return json.dumps({"images": images, "seconds": images / 10, "time": time.time(), **named}) + "\n"


def make_run(folder: Path, lines: int = 5, **status: object) -> Path:
    """Write a run folder with a decreasing loss. `status` is the content of the run's status file."""
    folder.mkdir(parents=True)
    rows = [line(10 * i, net__loss=1 / i, spread__net__loss=0.1, time__step_seconds=2.0) for i in range(1, lines + 1)]
    (folder / "metrics.jsonl").write_text("".join(rows))
    (folder / "config.toml").write_text(f'recipe = "dcgan"\nseed = {lines}\nlr = 0.1\n\n[provenance]\ntorch = "2.15"\n')
    if status:
        (folder / "status.json").write_text(json.dumps({"since": time.time(), "total_images": 100, **status}))
    return folder


def make_folder(base: Path) -> Path:
    """Create the folder `runs` with runs in every state."""
    root = base / "runs"
    host = os.uname().nodename
    make_run(root / "finished", state="finished", host=host)
    with (make_run(root / "stopped", state="stopped", host=host) / "config.toml").open("a") as config:
        config.write('\n[[provenance.earlier]]\nuntil_images = 100\ndevices = "2"\n')
    make_run(root / "nested" / "deeper" / "run", lines=3, state="finished", host=host)
    failed = make_run(root / "failed", state="failed", reason="ValueError: too many pigeons", host=host)
    (failed / "logs").mkdir()
    (failed / "logs" / "rank-0.txt").write_text(f"Connection closed\nkey: AWS_SECRET_ACCESS_KEY={SECRET}\n")
    (failed / "logs" / "rank-1.txt").write_text("Traceback (most recent call last):\nValueError: too many pigeons\n")
    killed = make_run(root / "killed", state="running", host=host)
    (killed / ".lock").write_text("1\n")
    elsewhere = make_run(root / "elsewhere", state="running", host="another-machine")
    (elsewhere / ".lock").write_text("1\n")
    silent = make_run(root / "silent", lines=0, state="running", host="another-machine", since=time.time() - 9000)
    os.utime(silent / "metrics.jsonl", (1e9, 1e9))
    for name in ODD_NAMES:
        make_run(root / name, state="finished", host=host)
    broken = make_run(root / "broken", lines=4)
    with (broken / "metrics.jsonl").open("ab") as file:
        file.write(
            b'{"images": 50, "net/lo\nnot json\n[1, 2]\n{"images": 60, "net/loss": NaN}\n\xff\xfe\n{"images": "7"}\n'
        )
        file.write(line(70, net__loss=0.5).encode())
        file.write(b'{"images": 80, "net/loss": [1], "net/other": "text", "net/big": 1e999}\n')
    private = make_run(root / "private")
    (private / ".lock").write_text("1\n")
    (private / "config.toml").write_text(
        f'recipe = "dcgan"\nmirror = "s3://user:{SECRET}@bucket/runs"\napi_key = "{SECRET}"\n'
        f'data_root = "https://host/data?token={SECRET}"\n\n[generator]\nlr = 0.3\n'
    )
    with_samples = make_run(root / "images", state="finished", host=host)
    (with_samples / "samples").mkdir()
    for images, color in ((0, 10), (100, 120), (200, 240)):
        Image.new("RGB", (8, 8), (color, 0, 0)).save(with_samples / "samples" / f"samples-{images:012}.png")
    (base / "outside").mkdir()
    (base / "outside" / "metrics.jsonl").write_text(line(1, net__loss=1.0))
    (base / "outside" / "secret.txt").write_text(OUTSIDE)
    (root / "a link to outside").symlink_to(base / "outside")
    leads_out = make_run(root / "leads out")
    (leads_out / "config.toml").unlink()
    (leads_out / "config.toml").symlink_to(base / "outside" / "secret.txt")
    (leads_out / "samples").symlink_to(base / "outside")
    (leads_out / "logs").mkdir()
    (leads_out / "logs" / "rank-0.txt").symlink_to(base / "outside" / "secret.txt")
    os.mkfifo(leads_out / "logs" / "rank-1.txt")
    return root
