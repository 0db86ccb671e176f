"""Runs that start at the same time compute the statistics of the real images once; the others wait for the first."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from running import Running, start_function_in_ranks, wait_until

from paceline.training.stop import RESUME_LATER

GAN = str(Path(__file__).parents[1] / "tiny_gan.py")
COMMAND = ("train", GAN, "--accelerator", "cpu", "--images", "64", "--set", "few_images=allow")


def train_held(folder: Path, arguments: tuple[str, ...], reminder_seconds: float) -> int:
    """Run a command that waits at the end of the real images while `folder` has a file `held`."""
    from paceline.cli.app import run
    from paceline.evaluation.evaluators.generation import Generation
    from paceline.training import evaluate

    evaluate.REMINDER_SECONDS = reminder_seconds
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    end_samples = Generation.end_samples

    def wait_and_end(evaluator: Generation, sums: object) -> None:
        (folder / f"computed-{os.getpid()}").touch()
        while (folder / "held").exists():
            time.sleep(0.01)
        end_samples(evaluator, sums)  # type: ignore[arg-type]

    Generation.end_samples = wait_and_end  # type: ignore[method-assign]
    return run(list(arguments))


def start(
    folder: Path, name: str, size: int = 1, *, reminder_seconds: float = 30.0, extra: tuple[str, ...] = ()
) -> list[Running]:
    arguments = (*COMMAND, "--devices", str(size), "--out", name, *extra)
    return start_function_in_ranks(folder, size, train_held, folder, arguments, reminder_seconds)


def num_computed(folder: Path) -> int:
    return len(list(folder.glob("computed-*")))


def has_printed(running: Running, line: str) -> bool:
    return (running.folder / f"stdout-{running.pid}").exists() and line in running.stdout


def test_a_run_that_is_asked_to_stop_no_longer_waits_for_another(tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.touch()
    (first,) = start(tmp_path, "first")
    wait_until(lambda: num_computed(tmp_path) == 1, first)
    (second,) = start(tmp_path, "second")
    wait_until(lambda: has_printed(second, "waiting for another run"), second)
    os.kill(second.pid, signal.SIGTERM)
    assert second.wait() == RESUME_LATER and num_computed(tmp_path) == 1, second.stderr
    held.unlink()
    assert first.wait() == 0
    assert list((second.folder / "second" / "checkpoints").iterdir())


@pytest.mark.parametrize("ends", ["normally", "killed"])
def test_a_run_waits_for_another_that_computes_the_same_statistics(tmp_path: Path, ends: str) -> None:
    held = tmp_path / "held"
    held.touch()
    (first,) = start(tmp_path, "first")
    wait_until(lambda: num_computed(tmp_path) == 1, first)
    waiting = [*start(tmp_path, "second"), *start(tmp_path, "third", size=2)]
    line = f"waiting for another run (process {first.pid}), which is processing the same images for its evaluation\n"
    for running in waiting[:2]:
        wait_until(lambda running=running: has_printed(running, line), running)
    if ends == "killed":
        first.kill()
        first.wait()
    held.unlink()
    assert [running.wait() for running in waiting] == [0, 0, 0], [running.stderr for running in waiting]
    assert [running.stdout.count("waiting for another run") for running in waiting] == [1, 1, 0], "only rank 0 prints"
    if ends == "normally":
        assert first.wait() == 0 and num_computed(tmp_path) == 1
    else:
        assert num_computed(tmp_path) in (2, 3), "one run, of one or two ranks, computes them instead"
    assert not list((tmp_path / "cache").rglob("*.lock"))


def test_a_run_that_waits_for_a_suspended_run_prints_why_until_the_other_run_dies(tmp_path: Path) -> None:
    (tmp_path / "held").touch()
    (first,) = start(tmp_path, "first", extra=("--loader", "workers", "--workers", "1"))
    wait_until(lambda: num_computed(tmp_path) == 1, first)
    os.kill(first.pid, signal.SIGSTOP)
    (second,) = start(tmp_path, "second", reminder_seconds=0.6)
    line = f"still waiting for another run (process {first.pid}), which is processing the same images"
    wait_until(lambda: has_printed(second, line), second)
    assert "after 600 s (--timeout), this run processes them itself" in second.stdout
    (tmp_path / "held").unlink()
    first.kill()
    assert second.wait() == 0 and num_computed(tmp_path) == 2, second.stderr
