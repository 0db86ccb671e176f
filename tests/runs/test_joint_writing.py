"""Several processes write one checkpoint together; each writes its own rows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import safetensors.torch
import torch

from paceline.core.errors import UserError
from paceline.runs import checkpoint
from paceline.runs.checkpoint import CheckpointNumbers, Checkpoints, Rows, Saver, Snapshot, load
from paceline.runs.tensor_files import write_tensors

SIZE = 3
WEIGHT = torch.arange(20.0).reshape(4, 5)  # two rows for the first two processes, none for the third
MOMENT = torch.arange(7, dtype=torch.float64)
METADATA = {"format": "pt", "note": "naïve"}


class Threads:
    """Exchanges texts among threads that stand for processes."""

    def __init__(self, rank: int, shared: list[str], barrier: threading.Barrier) -> None:
        self.rank, self._shared, self._barrier = rank, shared, barrier

    def exchange(self, text: str) -> list[str]:
        self._shared[self.rank] = text
        self._barrier.wait(60)
        texts = list(self._shared)
        self._barrier.wait(60)
        return texts


def part(rank: int) -> Snapshot:
    """Return the snapshot of one process, which has some rows of the sharded tensors and all other tensors."""
    weight, moment = (own_rows(whole, rank) for whole in (WEIGHT, MOMENT))
    weights = {"net.weight": weight, "net.tied": weight, "net.count": torch.tensor(3), "net.mask": torch.tensor([True])}
    state = {"net/weight/moment": moment, "net/weight/step": torch.tensor(5.0)}
    rows = dict.fromkeys(("net.weight", "net.tied"), Rows(first_row(WEIGHT, rank), tuple(WEIGHT.shape)))
    rows["net/weight/moment"] = Rows(first_row(MOMENT, rank), tuple(MOMENT.shape))
    return Snapshot(10, weights, state, CheckpointNumbers(), rows)


def first_row(whole: torch.Tensor, rank: int) -> int:
    return min(rank * -(-len(whole) // SIZE), len(whole))


def own_rows(whole: torch.Tensor, rank: int) -> torch.Tensor:
    return whole[first_row(whole, rank) : first_row(whole, rank + 1)]


def save_in_threads(folder: Path, before: Callable[[], None] = lambda: None) -> list[UserError | None]:
    """Save a checkpoint from all processes; return the error of each."""
    shared, barrier = [""] * SIZE, threading.Barrier(SIZE)

    def save(rank: int) -> UserError | None:
        saver = Saver(Checkpoints(folder, lambda: METADATA), Threads(rank, shared, barrier))
        try:
            saver.save(lambda: part(rank), 2, None, before=before)
            saver.wait()
        except UserError as error:
            return error
        return None

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(save, range(SIZE)))


def test_a_checkpoint_from_several_processes_contains_the_whole_tensors(tmp_path: Path) -> None:
    assert save_in_threads(tmp_path) == [None] * SIZE
    loaded = load(Checkpoints(tmp_path).path(10))
    assert torch.equal(loaded.weights["net.weight"], WEIGHT) and torch.equal(loaded.weights["net.tied"], WEIGHT)
    assert torch.equal(loaded.state["net/weight/moment"], MOMENT)
    assert loaded.weights["net.count"].item() == 3 and loaded.weights["net.mask"].item() is True
    assert loaded.state["net/weight/step"].item() == 5.0
    assert save_in_threads(tmp_path) == [None] * SIZE, "an intact checkpoint is kept, and no process waits forever"


@pytest.mark.parametrize(
    ("failing", "error"),
    [(0, MemoryError("no memory")), (1, OSError(28, "No space left on device")), (2, MemoryError())],
)
def test_a_process_that_cannot_write_its_rows_fails_the_checkpoint_and_no_process_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, error: Exception
) -> None:
    write_rows = checkpoint.write_rows

    def fail_in_one(path: Path, tensors: dict, first: dict) -> None:
        is_first = "net.count" in tensors or "net/weight/step" in tensors
        rows = tensors.get("net.weight", tensors.get("net/weight/moment"))
        rank = 0 if is_first else 1 if len(rows) and first["net.weight"] == 2 else 2
        if rank == failing:
            raise error
        write_rows(path, tensors, first)

    monkeypatch.setattr(checkpoint, "write_rows", fail_in_one)
    errors = save_in_threads(tmp_path)
    shown = "No space left on device" if isinstance(error, OSError) else f"MemoryError: {error}"
    assert shown in str(errors[0]) and errors[1:] == [None, None]
    assert (f"(rank {failing})" in str(errors[0])) == (failing > 0)
    assert list(tmp_path.iterdir()) == []


def test_buffers_of_every_dtype_are_written(tmp_path: Path) -> None:
    for dtype in (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64):
        tensor = torch.tensor([1.0, 2.0, 3.0]).to(dtype)
        write_tensors(tmp_path / "x", {"x": tensor}, {})
        loaded = safetensors.torch.load_file(tmp_path / "x")["x"]
        assert loaded.dtype == dtype and torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))


def test_no_process_waits_if_the_first_one_cannot_start_writing(tmp_path: Path) -> None:
    def fail() -> None:
        raise UserError("the run folder is gone")

    errors = save_in_threads(tmp_path, before=fail)
    assert str(errors[0]) == "the run folder is gone" and errors[1:] == [None, None]
