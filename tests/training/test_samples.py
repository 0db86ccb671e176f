"""The sample images of a run, which a background thread writes, survive a kill and are complete at the end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from holds import start_until
from PIL import Image
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


FIXED = """
from paceline import Loss, Phase, Recipe
from torch import nn

class Fixed(Recipe):
    phases = (Phase("network", "network"),)

    def __init__(self, settings, spec):
        super().__init__(settings, spec)
        self.shape = spec.channels, spec.height, spec.width
        self.network = nn.Linear(spec.channels * spec.height * spec.width, 4)  # supports images of one size only

    def network_loss(self, batch):
        return Loss({"square": self.network(batch["image"].flatten(1)).square().mean()})

    def predict(self, batch):
        return {"code": self.network(batch["image"].flatten(1))}

    def preview(self, batch):
        self.predict(batch)
        return {"image": batch["image"]}
"""


@pytest.mark.parametrize("size", [28, 264])
def test_strips_show_whole_images_of_all_classes_if_networks_support_one_size(tmp_path: Path, size: int) -> None:
    (tmp_path / "fixed.py").write_text(FIXED)
    colours = {"amber": (255, 191, 0), "blue": (0, 0, 255), "cyan": (0, 255, 255), "denim": (21, 96, 189)}
    for name, colour in colours.items():
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(5):
            Image.new("RGB", (size, size), colour).save(tmp_path / "images" / name / f"{number}.png")
    words = ["--data", "folder", "--data-root", "images", "--images", "8", "--batch-size", "8", "--accelerator", "cpu"]
    trained = run_fork(tmp_path, "train", "./fixed.py", *words, "--set", "validation=0", "--out", "run")
    assert trained.wait() == 0, trained.stderr
    again = run_fork(tmp_path, "sample", "run", "--trust", "--out", "again.png")
    assert again.wait() == 0, again.stderr
    for file in (tmp_path / "run/samples/samples-000000000008.png", tmp_path / "again.png"):
        strips = np.asarray(Image.open(file).convert("RGB"))
        areas = [int((strips == colour).all(axis=-1).sum()) for colour in colours.values()]
        assert areas == [size * size] * 4
