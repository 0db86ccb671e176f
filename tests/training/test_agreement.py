"""Hosts without a shared disk resume from the same checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from running import run_function_on_hosts

from paceline.config.settings import RunSettings
from paceline.parallel.world import join
from paceline.runs.checkpoint import Best, CheckpointNumbers, Snapshot, load
from paceline.runs.folder import RunFolder
from paceline.training.resume import claim_folder, newest_snapshot


def checkpoint(images: int) -> Snapshot:
    numbers = CheckpointNumbers(Best("validation/psnr", 30.0, 16))
    return Snapshot(images, {"network.weight": torch.full((3,), float(images))}, {}, numbers)


def meet_and_find() -> int:
    folder, world = RunFolder(Path("run")), join(RunSettings(accelerator="cpu"), distributed=True)
    claim_folder(folder, world, lambda: None)
    found = newest_snapshot(folder, world, print)
    assert found is not None and found.weights["network.weight"].eq(found.images).all()
    print(found.numbers.best)
    print(found.images)
    world.wait_for_all()
    world.leave()
    return 0


def test_hosts_copy_the_newest_and_the_best_checkpoint_from_one_another(tmp_path):
    folders = [tmp_path / str(number) for number in range(3)]
    for folder, held in zip(folders, [(), (24, 32), (16, 24)], strict=True):
        folder.mkdir()
        for images in held:
            (folder / "run").mkdir(exist_ok=True)
            RunFolder(folder / "run").checkpoints.save(checkpoint(images))
            (folder / "run" / "config.toml").write_text(f"images = {images}\n")
    hosts = run_function_on_hosts(folders, meet_and_find)
    assert [host.wait() for host in hosts] == [0, 0, 0], [host.stderr for host in hosts]
    assert all(host.stdout.splitlines()[-1] == "32" for host in hosts)
    for folder in folders:
        kept = RunFolder(folder / "run").checkpoints
        assert load(kept.path(16)).images == 16 and kept.all()[-1] == 32
        assert (folder / "run" / "config.toml").read_text() == "images = 32\n", "all ranks know the outcome"


def test_hosts_that_lack_a_usable_best_checkpoint_all_continue_without_one(tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(2)]
    for folder, held in zip(folders, [(16, 32), (24,)], strict=True):
        (folder / "run").mkdir(parents=True)
        (folder / "run" / "config.toml").touch()
        for images in held:
            RunFolder(folder / "run").checkpoints.save(checkpoint(images))
    (folders[0] / "run" / "checkpoints" / f"{16:012d}" / "weights.safetensors").write_bytes(b"damaged")
    hosts = run_function_on_hosts(folders, meet_and_find)
    assert [host.wait() for host in hosts] == [0, 0], [host.stderr for host in hosts]
    assert [host.stdout.splitlines()[-2:] for host in hosts] == [["None", "32"]] * 2
    reported = [line for host in hosts for line in host.stdout.splitlines() if "the best checkpoint" in line]
    assert len(reported) == 1 and f"{16:012d} is damaged" in reported[0]
