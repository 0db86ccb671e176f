"""The sample images of a run, which a background thread writes, survive a kill and are complete at the end."""

from __future__ import annotations

from pathlib import Path

import pytest
from holds import start_until
from running import run_fork, wait_until

GAN = str(Path(__file__).parents[1] / "tiny_gan.py")
COMMAND = ("train", GAN, "--accelerator", "cpu", "--set", "few_images=allow", "--out", "run")


def samples(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "run" / "samples").iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The sample images of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    running = run_fork(folder, *COMMAND)
    assert running.wait() == 0, running.stderr
    assert "% start-up" in running.stdout and "evaluation, sample images and saving together: " in running.stdout
    return samples(folder)


def test_the_last_sample_images_are_written_before_the_run_ends(whole: dict[str, bytes]) -> None:
    names = [f"samples-{images:012}.png" for images in (0, 640, 1280, 1920)]
    assert sorted(whole) == ["real-000000000000.png", *names]


def test_no_sample_images_are_written_if_they_are_switched_off(tmp_path: Path) -> None:
    running = run_fork(tmp_path, *COMMAND, "--images", "640", "--set", "sample_every=never")
    assert running.wait() == 0, running.stderr
    assert (tmp_path / "run" / "checkpoints").is_dir() and not (tmp_path / "run" / "samples").exists()


def test_a_killed_run_has_the_sample_images_of_its_checkpoint_and_ends_with_the_same_ones(
    whole: dict[str, bytes], tmp_path: Path
) -> None:
    (running,) = start_until(tmp_path, 1, 1312, *COMMAND)  # the run cannot end before it is killed
    checkpoint = tmp_path / "run" / "checkpoints"
    wait_until(lambda: checkpoint.is_dir() and [one for one in checkpoint.iterdir() if one.name.isdigit()], running)
    running.kill()
    running.wait()
    saved = max(int(one.name) for one in checkpoint.iterdir() if one.name.isdigit())
    kept = samples(tmp_path)
    before = [name for name in whole if name.endswith(".png") and int(name[-16:-4]) <= saved]
    assert all(kept[name] == whole[name] for name in before), "a checkpoint follows its sample images"
    assert run_fork(tmp_path, *COMMAND).wait() == 0
    assert samples(tmp_path) == whole
