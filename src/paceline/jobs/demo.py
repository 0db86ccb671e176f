"""The demonstration: one recipe under several strategies on embedded data, and what came of it."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.table import Table

from paceline.jobs.configure import configure
from paceline.jobs.train import train_and_report
from paceline.jobs.verify import verify
from paceline.monitor.metrics import read_metrics

CASES = (("single", 1), ("ddp", 2), ("lightning", 2))


def demo() -> int:
    """Trains the digits under every strategy that a CPU has, then shows the results side by side."""
    console = Console(highlight=False)
    table = Table(title="digits, ResNet-18 of width 16, the same seed", title_justify="left")
    for heading in ("strategy", "processes", "test top-1", "test loss", "images/s", "seconds"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    for strategy, devices in CASES:
        out = f"runs/demo-{strategy}-{devices}"
        console.rule(f"{strategy} × {devices}")
        config = configure(
            "classification",
            {
                "preset": "quick",
                "strategy": strategy,
                "devices": devices,
                "out": out,
                "accelerator": "cpu",
                "validation": 0,
            },
        )
        start = time.perf_counter()
        result = train_and_report(config)
        if result.exit_code:
            return result.exit_code
        lines, _ = read_metrics(result.folder)
        speeds = [line["time/images_per_second"] for line in lines if "time/images_per_second" in line]
        table.add_row(
            strategy,
            str(devices),
            f"{result.metrics['test/top1']:.2f} %",
            f"{result.metrics['test/loss']:.4f}",
            f"{sorted(speeds)[len(speeds) // 2]:,.0f}",
            f"{time.perf_counter() - start:.0f}",
        )
    console.rule("the same weights under every strategy?")
    small = configure("classification", {"devices": 2, "accelerator": "cpu"}, small=True)
    same = verify(small, ["single", "ddp", "lightning"], 5, 1e-9, "")
    console.print(table)
    console.print(
        "float32: sums over processes round otherwise, which training amplifies; in float64 weights agree (above)"
    )
    console.print(
        "look: .venv/bin/tensorboard --logdir runs   |   go on: .venv/bin/paceline train dcgan --preset quick"
    )
    return same


if __name__ == "__main__":
    sys.exit(demo())
