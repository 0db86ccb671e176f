"""A run that receives SIGTERM at a random moment of its life ends within seconds and can be resumed exactly."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from running import (
    Running,
    metrics_without_times,
    processes_naming,
    start_command,
    start_fork,
    wait_until,
    weights_of,
)

from paceline.runs.metrics import read_metrics

NUM_IMAGES = 400
START_UP = 0.3  # share of the moments before the first step
LONGEST_RUN_SECONDS = 600.0  # compiling takes minutes on a busy machine
NUM_MOMENTS = 10  # per loader and number of processes
LIMIT_SECONDS = 10.0  # on an idle machine
# 0: finished; 74: finished without a complete mirror; 75: saved; 143, or killed by the signal: nothing to save yet
CODES = (0, 74, 75, 128 + signal.SIGTERM, -signal.SIGTERM)
SETTINGS = ("pause=0.005", "slow_sync=0.02", "evaluation_pause=0.1", "dropout=0.2", "mirror_every=0.1")
SETTINGS += ("log_every=1 steps",)
LOADERS = {"resident": (), "workers": ("workers=1",), "dali": ("workers=1",)}

pytestmark = [pytest.mark.torture, pytest.mark.timeout(3 * LONGEST_RUN_SECONDS)]


class StopCase(NamedTuple):
    """A run that receives SIGTERM."""

    loader: str
    size: int  # number of processes; the signal goes to their launcher
    moment: float  # from 0 to 1; a run that starts up has not reached START_UP, and the rest is training
    delay: float  # seconds between this moment and the signal
    compiles: bool

    def __str__(self) -> str:
        return f"{self.loader}-{self.size}-at-{self.moment:.3f}{'-compiled' * self.compiles}"


def stop_cases() -> list[StopCase]:
    """Return ten moments for each loader, with one and with two processes. Two of the ten runs compile the network."""
    chance = random.Random(143)
    return [
        StopCase(
            loader,
            size,
            chance.random(),
            chance.uniform(0, 0.2),
            compiles=number % 5 == 4 and shutil.which("g++") is not None,
        )
        for loader in LOADERS
        for size in (1, 2)
        for number in range(NUM_MOMENTS)
    ]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Image files, which every loader can read."""
    import numpy as np
    from PIL import Image

    folder, chance = tmp_path_factory.mktemp("images"), np.random.default_rng(4)
    for label in ("a", "b"):
        (folder / label).mkdir()
        for number in range(100):
            pixels = chance.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{number}.png")
    return folder


def command_of(case: StopCase, recipe: str, images: Path, run: Path) -> tuple[str, ...]:
    settings = (*SETTINGS, f"loader={case.loader}", *LOADERS[case.loader], "size=0")
    assignments = [word for one in settings for word in ("--set", one)]
    words = (
        "--devices",
        str(case.size),
        "--images",
        str(NUM_IMAGES),
        "--out",
        str(run),
        "--mirror",
        f"file://{run}-mirror",
    )
    data = ("--data", "folder", "--data-root", str(images), *(("--compile",) if case.compiles else ()))
    return ("train", recipe, "--accelerator", "cpu", *data, *assignments, *words)


References = Callable[[StopCase], tuple[Path, float]]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory, tiny: str, images: Path) -> References:
    """Return a function that trains the same case without a signal and returns its folder and start-up time."""
    folder, kept = tmp_path_factory.mktemp("whole"), dict[StopCase, tuple[Path, float]]()

    def reference(case: StopCase) -> tuple[Path, float]:
        key = case._replace(moment=0, delay=0)
        if key not in kept:
            run, began = folder / str(key), time.time()
            running = start_command(folder, *command_of(case, tiny, images, run))
            assert running.wait(LONGEST_RUN_SECONDS) == 0, running.stderr
            kept[key] = run, (read_metrics(run)[0]["time"] or began) - began
        return kept[key]

    return reference


@pytest.mark.parametrize("case", stop_cases(), ids=str)
def test_sigterm_at_a_random_moment_ends_a_run_within_seconds_and_the_run_resumes_exactly(
    tmp_path: Path,
    tiny: str,
    images: Path,
    references: References,
    tally: Any,
    record_property: Callable[[str, object], None],
    case: StopCase,
) -> None:
    if case.loader == "dali" and not find_spec("nvidia.dali"):
        pytest.skip("NVIDIA DALI is not installed")
    counted = tally(f"SIGTERM, {case.loader}, {'one process' if case.size == 1 else 'two processes'}")
    reference, start_up = references(case)
    command = command_of(case, tiny, images, tmp_path / "run")
    running = start_command(tmp_path, *command)
    if case.moment < START_UP:
        time.sleep(case.moment / START_UP * start_up)
    else:
        wait_for_images(running, tmp_path / "run", NUM_IMAGES * (case.moment - START_UP) / (1 - START_UP))
    time.sleep(case.delay)
    running.kill(signal.SIGTERM)
    began, load = time.monotonic(), load_per_core()
    code = running.wait()
    seconds = time.monotonic() - began
    load = max(1.0, load, load_per_core())
    print(f"{case}: exit code {code}, {seconds:.2f} s after SIGTERM, load per core {load:.1f}")
    record_property("stop", [str(case), code, round(seconds, 2), round(load, 1)])  # for --junitxml
    again = start_fork(tmp_path, *command).wait(LONGEST_RUN_SECONDS)
    counted.add(str(case), fault_of(tmp_path / "run", reference, code, seconds / load, again))
    counted.check()


def wait_for_images(running: Running, run: Path, images: float) -> None:
    """Wait until a run has logged a step after this number of images, or has ended."""
    while not running.ended and not any((line["images"] or 0) >= images for line in read_metrics(run)):
        time.sleep(0.01)


def load_per_core() -> float:
    """Return the load average per core: how many times longer a process may take than on an idle machine."""
    return os.getloadavg()[0] / len(os.sched_getaffinity(0))


def fault_of(run: Path, reference: Path, code: int, seconds: float, code_of_resumed: int) -> str:
    """Describe what is wrong with a stopped and resumed run; return an empty string if nothing is wrong."""
    if code not in CODES:
        return f"ended with {code}"
    if seconds > LIMIT_SECONDS:
        return f"ended after {seconds:.1f} s (divided by the load per core)"
    if code_of_resumed:
        return f"the resumed run ended with {code_of_resumed}"
    if weights_of(run) != weights_of(reference):
        return "the weights differ from those of the uninterrupted run"
    if metrics_without_times(run) != metrics_without_times(reference):
        return "the metrics differ from those of the uninterrupted run"
    try:
        wait_until(lambda: not processes_naming(str(run)), seconds=5)
    except AssertionError:
        return "left processes behind"
    return ""
