"""Measure how quickly the board opens, and its memory, with many runs and with one very long run.

    python benchmarks/board_size.py --repeats 3

Writes 200 runs with 2,000 lines each, and one run with 1,000,000 lines, and opens each folder in headless Chromium with
a new server. Prints the median, lowest and highest value of: the time until a chart shows every run; the time until all
lines are read; the memory of the server once all lines are read; the JavaScript heap of the page; and the size and time
of the answer that the page requests every two seconds. To measure another version, set PYTHONPATH to its `src` folder.
This benchmark needs Chromium.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "board"))
from board import write_runs
from browser import Browser, find_chromium
from serving import Served, serve

CASES = {"200 runs × 2,000 lines": (200, 2000), "1 run × 1,000,000 lines": (1, 1_000_000)}
SHOWN = """[...document.querySelectorAll('#wall .card[data-values]')].some((card) => Number(card.dataset.values) > 0 &&
    card.querySelector('canvas').getAttribute('aria-label').includes(', %d runs')) && performance.now()"""
NUM_POLLS = 5


def measure(root: Path, num_runs: int) -> dict[str, float]:
    """Open the page once with a new server and a new browser."""
    with serve(root) as board, Browser() as browser:
        opened = time.monotonic()
        browser.open(board.url)
        while not (shown := browser.evaluate(SHOWN % num_runs)):
            time.sleep(0.01)
        while not all(run["read_share"] == 1 for run in board.json("/api/runs")["runs"]):
            time.sleep(0.2)
        read = time.monotonic() - opened
        time.sleep(3)  # the page requests the final curves
        seconds, size = poll(board)
        return {
            "page shows every run (s)": shown / 1000,
            "all lines read (s)": read,
            "memory of the server (MiB)": board.memory_mib(),
            "JavaScript heap (MiB)": browser.evaluate("performance.memory.usedJSHeapSize") / 2**20,
            "answer of a poll (kB)": size / 1000,
            "answer of a poll (ms)": 1000 * seconds,
        }


def poll(board: Served) -> tuple[float, int]:
    """Return the median time of a request for the runs that have changed, and the compressed size of the answer."""
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
    arguments.add_argument("--repeats", type=int, default=3, help="how often each folder is opened")
    arguments.add_argument("--folder", help="folder for the runs, kept afterwards; existing runs are used again")
    arguments.add_argument("--json", help="also write the results to this file")
    options = arguments.parse_args()
    if not find_chromium():
        sys.exit("benchmarks/board_size.py needs Chromium")
    results: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="paceline-board-") as temporary:
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, n = {options.repeats}", flush=True)
        for title, (num_runs, num_lines) in CASES.items():
            root = Path(options.folder or temporary) / f"{num_runs}-{num_lines}"
            if not root.exists():
                root.mkdir(parents=True)
                write_runs(root, num_runs, num_lines)
            found = [measure(root, num_runs) for _ in range(options.repeats)]
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
