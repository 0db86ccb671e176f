"""Runs of a small experiment for tests of the page: four learning rates, with metrics, samples and logs."""

from __future__ import annotations

import math
import time
from pathlib import Path

from made_runs import line
from PIL import Image

RATES = {"low": 0.001, "middle": 0.01, "high": 0.1, "wild": 1.0}
NUM_LINES = 120


def make_compared_runs(root: Path) -> Path:
    """Write the runs; the name of each is the key of its learning rate in `RATES`."""
    for number, (name, rate) in enumerate(RATES.items()):
        run = root / name
        (run / "samples").mkdir(parents=True)
        (run / "logs").mkdir()
        rows = [
            line(
                100 * i,
                net__loss=(1 + number) / i + 0.1 * math.sin(i),
                time__images_per_second=1000.0,
                time__step_seconds=1.0,
                host__cpu_percent=40.0 + number,
            )
            for i in range(1, NUM_LINES + 1)
        ]
        rows += [line(100 * i, validation__top1=50.0 + i / 10 + number) for i in (40, 80, NUM_LINES)]
        rows.append(line(100 * NUM_LINES, test__top1=60.0 + number, test__checkpoint_images=100 * NUM_LINES))
        (run / "metrics.jsonl").write_text("".join(rows))
        odd = 'constructor = "odd"\n' if name == "wild" else ""  # every JavaScript object has such a property
        (run / "config.toml").write_text(f'recipe = "dcgan"\nseed = 3\n{odd}\n[generator]\nlr = {rate}\n')
        status = f'{{"state": "finished", "since": {time.time() - 100 * number}, "total_images": 12000}}'
        (run / "status.json").write_text(status)
        for images in (0, 6000, 12000):
            color = (60 * number, images // 60, 90)
            Image.new("RGB", (16, 16), color).save(run / "samples" / f"samples-{images:012}.png")
        (run / "logs" / "rank-0.txt").write_text(f"training with lr {rate}\nWarning: something\n" + "step\n" * 50)
    return root
