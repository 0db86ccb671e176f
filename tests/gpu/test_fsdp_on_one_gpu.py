"""Two processes that share one GPU train sharded networks like one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from running import run_fork, weights_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
TWO_ON_ONE = ("--gpus", "0,0", "--devices", "2")


@pytest.mark.parametrize("recipe", ["classification", "dcgan", "super_resolution", "translation"])
def test_sharded_networks_end_with_the_weights_of_one_process(tmp_path: Path, recipe: str) -> None:
    verified = run_fork(tmp_path, "verify", recipe, "--strategies", "single,fsdp", "--steps", "5", *TWO_ON_ONE)
    assert verified.wait() == 0, verified.stdout + verified.stderr


def test_a_sharded_run_in_bf16_saves_evaluates_and_resumes(tmp_path: Path) -> None:
    blocky = str(Path(__file__).parents[1] / "blocky.py")
    command = ("train", blocky, "--strategy", "fsdp", *TWO_ON_ONE, "--precision", "bf16", "--deterministic")
    for more in (("--out", "whole"), ("--images", "120", "--out", "parts"), ("--images", "240", "--out", "parts")):
        trained = run_fork(tmp_path, *command, *more)
        assert trained.wait() == 0, trained.stdout + trained.stderr
    assert weights_of(tmp_path / "parts") == weights_of(tmp_path / "whole")
