"""Measure how quickly the board opens, and its memory, with many runs and with one very long run.

    python benchmarks/board_speed.py --repeats 3

Writes 200 runs with 2,000 lines each, and one run with 1,000,000 lines, and opens each folder in headless Chromium with
a new server. Prints the median, lowest and highest value of: the time until the page lists every run; the time until a
chart shows a curve of every run; the time until the curves of the chart contain every line; the CPU time and memory
(RSS) of the server at that point; the JavaScript heap of the page; and the size and time of the response that the
page requests every two seconds. Times start when the page is opened. To measure another version, set PYTHONPATH to its
`src` folder. This benchmark needs Chromium.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "board"))
from browser import Browser, find_chromium
from serving import Served, serve

CASES = {"200 runs × 2,000 lines": (200, 2000), "1 run × 1,000,000 lines": (1, 1_000_000)}
LISTED = "document.querySelectorAll('#list .run').length == %d && performance.now()"
SHOWN = """[...document.querySelectorAll('#wall .card[data-values]')].some((card) => Number(card.dataset.values) > 0 &&
    card.querySelector('canvas').getAttribute('aria-label').includes(', %d runs')) && performance.now()"""
COMPLETE = """[...document.querySelectorAll('#wall .card[data-values]')].some((card) =>
    Number(card.dataset.values) == %d) && performance.now()"""
NUM_POLLS = 5


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


def measure(root: Path, num_runs: int, num_lines: int) -> dict[str, float]:
    """Open the page once with a new server and a new browser."""
    with serve(root) as board, Browser() as browser:
        browser.open(board.url)
        listed = wait_for(browser, LISTED % num_runs)
        shown = wait_for(browser, SHOWN % num_runs)
        complete = wait_for(browser, COMPLETE % (num_runs * num_lines))
        processor, memory = processor_seconds(board), board.memory_mib()
        seconds, size = poll(board)
        return {
            "page lists every run (s)": listed,
            "a chart shows every run (s)": shown,
            "every curve is complete (s)": complete,
            "CPU time of the server (s)": processor,
            "memory of the server (MiB)": memory,
            "JavaScript heap (MiB)": browser.evaluate("performance.memory.usedJSHeapSize") / 2**20,
            "size of a poll response (kB)": size / 1000,
            "time of a poll request (ms)": 1000 * seconds,
        }


def wait_for(browser: Browser, expression: str) -> float:
    """Return the seconds from the start of the navigation until an expression on the page is true."""
    while not (milliseconds := browser.evaluate(expression)):
        time.sleep(0.02)
    return float(milliseconds) / 1000


def processor_seconds(board: Served) -> float:
    """Return the CPU time of the server in user and kernel mode."""
    fields = Path(f"/proc/{board.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def poll(board: Served) -> tuple[float, int]:
    """Return the median time of a request for the runs that have changed, and the compressed size of the response."""
    times, size = [], 0
    after = board.json("/api/runs").get("sequence", 0)  # versions without this number always send every run
    for _ in range(NUM_POLLS):
        start = time.perf_counter()
        size = len(board.ask(f"/api/runs?after={after}", headers={"Accept-Encoding": "gzip"}).body)
        times.append(time.perf_counter() - start)
    return statistics.median(times), size


def main() -> None:
    """Measure both cases and print a table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--repeats", type=int, default=3, help="number of times that each folder is opened")
    arguments.add_argument("--folder", help="folder for the runs, kept afterwards; existing runs are used again")
    arguments.add_argument("--json", help="also write the results to this file")
    options = arguments.parse_args()
    if not find_chromium():
        sys.exit("benchmarks/board_speed.py needs Chromium")
    results: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="paceline-board-") as temporary:
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, n = {options.repeats}", flush=True)
        for title, (num_runs, num_lines) in CASES.items():
            root = Path(options.folder or temporary) / f"{num_runs}-{num_lines}"
            if not root.exists():
                root.mkdir(parents=True)
                write_runs(root, num_runs, num_lines)
            found = [measure(root, num_runs, num_lines) for _ in range(options.repeats)]
            results[title] = {name: [one[name] for one in found] for name in found[0]}
            print(f"\n{title}\n| measurement | median | lowest | highest |\n|---|---|---|---|")
            for name, values in results[title].items():
                print(
                    f"| {name} | {statistics.median(values):.3g} | {min(values):.3g} | {max(values):.3g} |", flush=True
                )
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
