"""Training the image translation recipe, which has ten networks, in several processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import spoil_and_check
from running import run_fork, start_function_in_ranks

SMALL = {"generator": "resnet_6", "segmentation_generator": "unet_32", "ngf": 1, "ndf": 1, "d_layers": 1, "crop": 32}


@pytest.mark.slow
def test_all_strategies_produce_the_same_weights_for_many_networks(tmp_path: Path) -> None:
    command = ("verify", "translation", "--strategies", "single,ddp,lightning", "--devices", "2", "--steps", "3")
    verified = run_fork(tmp_path, *command, "--set", "model=deepliif", "--set", "ngf=1", "--set", "ndf=1")
    assert verified.wait() == 0, verified.stdout + verified.stderr
    rows = [line.split() for line in verified.stdout.splitlines() if " weights " in line]
    assert {(strategy, network) for strategy, network, *_ in rows} == {
        (strategy, group) for strategy in ("ddp", "lightning") for group in ("generators", "discriminators")
    }


def test_replicas_have_equal_weights_and_a_changed_weight_is_reported(tmp_path: Path) -> None:
    settings = SMALL | {"devices": 2, "batch_size": "2"}
    ranks = start_function_in_ranks(tmp_path, 2, spoil_and_check, "translation", "generators.GS1", settings)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
    assert "the replicas of network 'generators.GS1' differ: ranks [1] do not match rank 0" in ranks[0].stdout
