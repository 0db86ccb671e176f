"""Damage to a checkpoint is always detected, and the error contains the name of the damaged file."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from running import run_fork

from paceline.runs.checkpoint import Checkpoints, Damaged, load

pytestmark = [pytest.mark.torture, pytest.mark.timeout(900)]


class Damage(NamedTuple):
    """A checkpoint file with changed content."""

    name: str
    file: str
    content: bytes


def bit_flips(files: dict[str, bytes], count: int) -> Iterator[Damage]:
    """Yield copies of the files with one flipped bit each; the flips are spread evenly across the files."""
    chance, names = random.Random(91), sorted(files)
    for number in range(count):
        file = names[number % len(names)]
        content = bytearray(files[file])
        position = chance.randrange(8 * len(content))
        content[position // 8] ^= 1 << position % 8
        yield Damage(f"bit {position} of {file}", file, bytes(content))


def large_damages(files: dict[str, bytes], count: int) -> Iterator[Damage]:
    """Yield copies of the files that are truncated, extended, partly zeroed or rotated."""
    chance, names = random.Random(92), sorted(files)
    for number in range(count):
        file = names[number % len(names)]
        content = files[file]
        start, length = chance.randrange(len(content)), chance.randrange(1, 4096)
        kinds = {
            "cut": content[:start],
            "extended": content + chance.randbytes(length),
            "zeroed": content[:start] + bytes(min(length, len(content) - start)) + content[start + length :],
            "shifted": content[start:] + content[:start],
        }
        kind = list(kinds)[number // len(names) % len(kinds)]
        if kinds[kind] != content:
            yield Damage(f"{file} {kind} at {start}", file, kinds[kind])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny: str) -> Path:
    """A checkpoint from a real run."""
    folder = tmp_path_factory.mktemp("flips")
    settings = ("--set", "optimizer=adam", "--set", "ema_half_life=64 images", "--images", "160")
    assert run_fork(folder, "train", tiny, *settings, "--out", "run").wait() == 0
    return Checkpoints(folder / "run" / "checkpoints").path(160)


def files_of(checkpoint: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in checkpoint.iterdir()}


def try_damages(checkpoint: Path, damages: Iterator[Damage], whole: dict[str, bytes], counted: Any) -> None:
    for damage in damages:
        (checkpoint / damage.file).write_bytes(damage.content)
        try:
            load(checkpoint)
            fault = "was loaded"
        except Damaged as error:
            fault = "" if damage.file in error.reason else f"the message does not name the file: {error.reason}"
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        counted.add(damage.name, fault)
        (checkpoint / damage.file).write_bytes(whole[damage.file])
    load(checkpoint)
    counted.check()


def test_each_of_a_thousand_flipped_bits_is_detected(checkpoint: Path, tally: Any) -> None:
    whole = files_of(checkpoint)
    assert len(whole) == 4
    try_damages(checkpoint, bit_flips(whole, 1000), whole, tally("bit flips in checkpoints"))


def test_truncated_extended_and_overwritten_files_are_detected(checkpoint: Path, tally: Any) -> None:
    whole = files_of(checkpoint)
    try_damages(checkpoint, large_damages(whole, 200), whole, tally("damaged ranges in checkpoints"))
