"""Measure how long the board takes to show the curves of many long runs, in headless Chromium.

    python benchmarks/board.py --runs 50 --points 100000

Writes the runs (about 290 bytes per line) into a temporary folder, starts `paceline board`, and opens the page in
Chromium. Prints the time from opening the page until every run has a curve on the first chart (with a new server, and
with one that has already read everything), the time until all lines are read, and the frame time while scrolling.
This benchmark needs Chromium.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "board"))
from browser import Browser, find_chromium
from serving import serve

DRAWN = """[...document.querySelectorAll('#wall canvas')].filter((canvas) =>
    canvas.getAttribute('aria-label').endsWith(', %d runs')).length"""
SCROLL = """new Promise((done) => {
  const main = document.querySelector('main'), gaps = [];
  let before = performance.now();
  const start = before;
  function frame(now) {
    gaps.push(now - before); before = now;
    main.scrollTop = (main.scrollHeight - main.clientHeight) * Math.abs(Math.sin((now - start) / 1500));
    if (now - start < 4000) requestAnimationFrame(frame); else done(gaps.slice(1));
  }
  requestAnimationFrame(frame);
})"""


def write_runs(root: Path, num_runs: int, num_points: int) -> None:
    """Write run folders whose metrics form plausible curves."""
    random = np.random.default_rng(0)
    steps = np.arange(1, num_points + 1)
    for number in range(num_runs):
        folder = root / f"run-{number:03}"
        folder.mkdir()
        rate = random.uniform(2, 8)
        loss = 2.3 * np.exp(-rate * steps / num_points) + 0.1 + 0.05 * random.standard_normal(num_points)
        second = 0.7 + 0.1 * np.cumsum(random.standard_normal(num_points)) / np.sqrt(num_points)
        speed = 9000 + 300 * random.standard_normal(num_points)
        with (folder / "metrics.jsonl").open("w") as file:
            file.writelines(
                f'{{"images": {128 * step}, "seconds": {step / 70:.3f}, "time": {1.7e9 + step / 70:.3f}, '
                f'"generator/adversarial": {a}, "spread/generator/adversarial": {abs(a) / 20}, '
                f'"discriminator/real": {b}, "time/images_per_second": {c:.1f}, "time/step_seconds": 0.014, '
                f'"lr/generator": 0.0002}}\n'
                for step, a, b, c in zip(steps.tolist(), loss.tolist(), second.tolist(), speed.tolist(), strict=True)
            )
        (folder / "config.toml").write_text(f'recipe = "dcgan"\nseed = {number}\n')


def wait_for_curves(browser: Browser, num_runs: int) -> float:
    """Return the seconds from the start of the navigation until one chart shows a curve for every run."""
    while not browser.evaluate(DRAWN % num_runs):
        time.sleep(0.01)
    return float(browser.evaluate("performance.now()")) / 1000


def main() -> None:
    """Run the measurements and print each result as soon as it is available."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--runs", type=int, default=50, help="number of runs")
    arguments.add_argument("--points", type=int, default=100_000, help="lines per run")
    arguments.add_argument(
        "--folder", help="folder for the runs, kept afterwards; the runs are written only if it is empty"
    )
    options = arguments.parse_args()
    if not find_chromium():
        sys.exit("benchmarks/board.py needs Chromium")
    with tempfile.TemporaryDirectory(prefix="paceline-board-") as temporary:
        root = Path(options.folder or temporary)
        root.mkdir(parents=True, exist_ok=True)
        if not any(root.iterdir()):
            write_runs(root, options.runs, options.points)
        size = sum(file.stat().st_size for file in root.glob("*/metrics.jsonl")) / 2**20
        print(f"{options.runs} runs × {options.points:,} lines, {size:,.0f} MiB")
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
        with Browser() as browser, serve(root) as board:
            start = time.monotonic()
            browser.open(board.url)
            print(f"first visit, new server: {wait_for_curves(browser, options.runs):.2f} s", flush=True)
            print(f"scrolling while the server reads: {scroll(browser)}", flush=True)
            while not all(run["read_share"] == 1 for run in board.json("/api/runs")["runs"]):
                time.sleep(0.5)
            print(
                f"all lines read after {time.monotonic() - start:.1f} s; server {board.memory_mib():.0f} MiB",
                flush=True,
            )
            for _ in range(3):
                browser.open("about:blank")
                browser.open(board.url)
                print(f"next visit: {wait_for_curves(browser, options.runs):.2f} s", flush=True)
            time.sleep(3)
            print(f"scrolling: {scroll(browser)}; load {os.getloadavg()[0]:.1f}")


def scroll(browser: Browser) -> str:
    """Scroll up and down and return a description of the frame times."""
    gaps = np.array(browser.evaluate(SCROLL))
    median, most = np.percentile(gaps, [50, 99])
    return f"frames {median:.1f} ms apart, 99 % below {most:.1f} ms, worst {gaps.max():.1f} ms, n {len(gaps)}"


if __name__ == "__main__":
    main()
