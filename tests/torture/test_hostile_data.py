"""Training on a stranger's packed folder ends in one line or trains, and never prints a traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile_packs import DAMAGES, GOOD, Pack
from probes import run_command, run_probe

pytestmark = [pytest.mark.torture, pytest.mark.timeout(1500)]

TRAIN = ["train", "classification", "--data", "packed", "--data-root", "in/packed", "--images", "24", "--out", "run"]
TRAIN += ["--batch-size", "12", "--workers", "0", "--accelerator", "cpu"]
TRAIN += [word for one in ("width=8", "size=8", "pad_crop=0", "validation=0") for word in ("--set", one)]
EVERY = 8  # the suite opens all of these packs


def test_no_pack_ends_training_with_a_traceback(tmp_path: Path, tally: Callable[[str], Any]) -> None:
    found = tally("a stranger's packed folder")
    for number, (name, change) in enumerate([*list(DAMAGES.items())[::EVERY], *GOOD.items()]):
        folder = tmp_path / str(number)
        pack = Pack()
        change(pack)
        pack.write(folder / "in" / "packed")
        ended = run_probe(folder, run_command, TRAIN)
        expected = 0 if name in GOOD else 2
        fault = "" if ended.code == expected else f"ended with exit code {ended.code}: {ended.errors[-300:]}"
        found.add(name, ended.fault or fault)
    found.check()
