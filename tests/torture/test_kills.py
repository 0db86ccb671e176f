"""A run killed at random moments and resumed ends with the same weights and state as an uninterrupted run."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from running import (
    TIMEOUT_SECONDS,
    Running,
    metrics_without_times,
    processes_naming,
    run_fork,
    run_ranks,
    start_command,
    start_fork,
    start_ranks,
    wait_until,
    weights_of,
    workers_of,
)

from paceline.runs.checkpoint import Checkpoints

pytestmark = [pytest.mark.torture, pytest.mark.timeout(900)]

# Delays make it more likely that a kill hits a save, a step or an evaluation.
SETTINGS = ("slow_sync=0.02", "pause=0.005", "evaluation_pause=0.05", "dropout=0.2", "ema_half_life=100 images")
LOADERS = {"resident": (), "workers": ("loader=workers", "workers=1")}
MOMENTS = ("any", "checkpoint", "settings", "evaluation")
# r3gan has more state: the strength of the augmentation and several schedules.
R3GAN = (
    *("nz=8", "width=8", "num_blocks=1", "group_size=4", "size=16", "penalty_every=2", "lr=1e-3", "batch_size=16"),
    *("ada=blit,geometry,color", "ada_images=400", "ada_target=0", "burn_in=50%", "ema_half_life=64 images"),
    *("save_every=32 images", "evaluate_every=100 epochs", "sample_every=100 epochs", "few_images=allow"),
)
EVALUATE_EVERY = 8 * 16  # number of images, as in the recipe


class KillCase(NamedTuple):
    """A run that is killed one or more times."""

    number: int  # case number, also part of the random seed
    how: str  # "single", "ranks" (started as with srun) or "launcher"
    loader: str
    moments: tuple[str, ...]  # one moment for each kill
    is_r3gan: bool = False

    def __str__(self) -> str:
        return f"{self.number}-{self.how}-{self.loader}-{'-'.join(self.moments)}{'-r3gan' * self.is_r3gan}"


def kill_cases() -> list[KillCase]:
    """Return 60 cases: 35 with one process, 25 with two."""
    chance = random.Random(91)
    kinds = ["single"] * 30 + ["ranks"] * 12 + ["launcher"] * 8
    cases = []
    for number, how in enumerate(kinds):
        first = MOMENTS[number % len(MOMENTS)]
        others = tuple(chance.choice(MOMENTS) for _ in range(chance.choice((0, 0, 1, 2)) if how != "launcher" else 0))
        cases.append(KillCase(number, how, chance.choice(list(LOADERS)), (first, *others)))
    hows = ("single", "ranks")
    return cases + [
        KillCase(50 + number, hows[number % 2], "resident", ("any", "checkpoint")[: 1 + number % 3], is_r3gan=True)
        for number in range(10)
    ]


def command_of(case: KillCase, recipe: str) -> tuple[str, ...]:
    """Return the training command for a case, without `--out`."""
    settings = R3GAN if case.is_r3gan else (*SETTINGS, *LOADERS[case.loader])
    assignments = [word for one in settings for word in ("--set", one)]
    words = ("train", "r3gan" if case.is_r3gan else recipe, *assignments, "--accelerator", "cpu")
    return (*words, "--images", "400", "--devices", "1" if case.how == "single" else "2")


def start(folder: Path, case: KillCase, command: tuple[str, ...]) -> list[Running]:
    """Start a case's run and return its processes."""
    if case.how == "ranks":
        return start_ranks(folder, 2, *command)
    return [(start_fork if case.how == "single" else start_command)(folder, *command)]


def has_come(moment: str, run: Path) -> bool:
    """Return whether a run has reached the given moment, judging by its files."""
    if moment == "settings":
        return any(run.glob(".*.writing"))
    if moment == "checkpoint":
        return any((run / "checkpoints").glob(".writing-*"))
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return bool(lines) and f'"images": {EVALUATE_EVERY},' in lines[-1] and "validation/" not in lines[-1]


def wait_for(moment: str, run: Path, running: Running, chance: random.Random, duration: float) -> None:
    """Wait until a random time shortly after the given moment, or until the run ends."""
    until = time.monotonic() + (chance.random() * duration if moment == "any" else TIMEOUT_SECONDS)
    while time.monotonic() < until and not running.ended:
        if moment != "any" and has_come(moment, run):
            time.sleep(0.1 * chance.random())
            return
        time.sleep(0.002)


def kill_once(folder: Path, run: Path, case: KillCase, moment: str, recipe: str, duration: float, seed: int) -> bool:
    """Start a run and kill it; return whether the run was still active."""
    chance = random.Random(f"{case} {moment} {seed}")
    started = start(folder, case, (*command_of(case, recipe), "--out", str(run)))
    wait_for(moment, run, started[0], chance, duration)
    victims = [one.pid for one in started]
    if case.how == "launcher":
        victims += workers_of(started[0].pid).values()
    chosen = victims if case.how == "ranks" and chance.random() < 0.3 else [chance.choice(victims)]
    alive = not started[0].ended
    for pid in chosen if alive else ():
        os.kill(pid, signal.SIGKILL)
    if alive and case.how == "ranks":  # end the other rank, too, as srun does
        time.sleep(1)
        for one in started:
            if not one.ended:
                one.kill()
    return any([one.wait() for one in started]) and alive


References = Callable[[KillCase], tuple[Path, float]]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory, tiny: str) -> References:
    """Return a function that trains the same case without kills and returns its folder and duration."""
    folder, kept = tmp_path_factory.mktemp("whole"), {}

    def reference(case: KillCase) -> tuple[Path, float]:
        key = case.how, case.loader, str(case.is_r3gan)
        if key not in kept:
            run, began = folder / "-".join(key), time.monotonic()
            if case.how == "launcher":  # gives the same result as "ranks" but starts more slowly
                run, duration = reference(case._replace(how="ranks"))
                kept[key] = run, duration + 10
                return kept[key]
            started = start(folder, case, (*command_of(case, tiny), "--out", str(run)))
            assert [one.wait() for one in started] == [0] * len(started), started[0].stderr
            kept[key] = run, time.monotonic() - began
        return kept[key]

    return reference


@pytest.mark.parametrize("case", kill_cases(), ids=str)
def test_a_run_killed_at_random_moments_ends_with_bit_identical_weights(
    tmp_path: Path, tiny: str, references: References, tally: Any, case: KillCase
) -> None:
    counted = tally(f"kill -9, {'one process' if case.how == 'single' else 'two processes'}")
    reference, duration = references(case)
    run, hits = tmp_path / "run", 0
    for attempt in range(6):
        for moment in case.moments:
            hits += kill_once(tmp_path, run, case, moment, tiny, duration / 2**attempt, attempt)
        if hits:
            break
        shutil.rmtree(run)  # the run ended before any kill: try again with earlier kills
    command = (*command_of(case, tiny), "--out", str(run))
    codes = run_ranks(tmp_path, 2, *command) if case.how != "single" else [run_fork(tmp_path, *command).wait()]
    counted.add(str(case), fault_of(run, reference, codes, hits))
    counted.check()


def fault_of(run: Path, reference: Path, codes: list[int], hits: int) -> str:
    """Describe what is wrong with a resumed run; return an empty string if nothing is wrong."""
    if not hits:
        return "was never hit while it ran"
    if any(codes):
        return f"the resumed run ended with {codes}"
    if weights_of(run) != weights_of(reference):
        return "the weights differ from those of the uninterrupted run"
    if state_of(run) != state_of(reference):
        return "the optimizer's state or the signals differ from those of the uninterrupted run"
    if metrics_without_times(run) != metrics_without_times(reference):
        return "the metrics differ from those of the uninterrupted run"
    leftovers = [str(path) for path in (run / "checkpoints").glob(".*")]
    if leftovers:
        return f"left {leftovers}"
    try:
        wait_until(lambda: not processes_naming(str(run)), seconds=5)
    except AssertionError:
        return "left processes behind"
    return ""


def state_of(run: Path) -> dict[str, bytes]:
    """Return the optimizer state and the signals of the last checkpoint."""
    last = Checkpoints(run / "checkpoints").latest(pytest.fail)
    assert last is not None
    return {name: tensor.numpy().tobytes() for name, tensor in last.state.items()}
