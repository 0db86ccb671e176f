"""Training continues while a thread writes a checkpoint, and errors in the thread are raised in the training loop."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from paceline.core.errors import UserError
from paceline.runs.checkpoint import CheckpointNumbers, Checkpoints, Saver, Snapshot, load
from paceline.runs.tensor_files import HostCopy


def snapshot(images: int) -> Snapshot:
    return Snapshot(images, {"network.weight": torch.full((3,), float(images))}, {}, CheckpointNumbers())


def test_training_continues_while_a_checkpoint_is_written_and_the_next_save_waits(tmp_path: Path) -> None:
    checkpoints, may_write, order = Checkpoints(tmp_path), threading.Event(), []
    saver = Saver(checkpoints)

    def flush() -> None:
        may_write.wait(60)
        order.append("metrics")

    saver.save(lambda: snapshot(10), 2, None, before=flush, after=lambda: order.append(checkpoints.all()))
    assert checkpoints.all() == [] and order == []
    threading.Timer(0.2, may_write.set).start()
    saver.save(lambda: snapshot(20), 2, None)
    assert checkpoints.all()[0] == 10 and order == ["metrics", [10]]
    saver.wait()
    assert checkpoints.all() == [10, 20] and saver.num_saves == 2
    assert load(checkpoints.path(20)).weights["network.weight"].tolist() == [20.0] * 3


def test_a_run_waits_for_its_last_checkpoint_even_after_an_error(tmp_path: Path) -> None:
    may_write = threading.Event()
    with pytest.raises(ZeroDivisionError), Saver(Checkpoints(tmp_path)) as saver:
        saver.save(lambda: snapshot(10), 2, None, before=lambda: may_write.wait(60) and None)
        threading.Timer(0.2, may_write.set).start()
        raise ZeroDivisionError
    assert Checkpoints(tmp_path).all() == [10]


def test_an_error_in_the_checkpoint_thread_is_raised_once_in_the_training_loop(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    saver = Saver(Checkpoints(tmp_path / "checkpoints"))
    saver.save(lambda: snapshot(10), 2, None)
    with pytest.raises(UserError, match=r"cannot write checkpoint .*; no checkpoint has been written yet"):
        saver.wait()
    saver.check()
    with pytest.raises(UserError, match="cannot write checkpoint"), saver:
        saver.save(lambda: snapshot(20), 2, None)


def test_copied_tensors_are_not_changed_by_training_and_keep_sharing_and_layout() -> None:
    weight = torch.arange(48.0).reshape(2, 3, 2, 4).to(memory_format=torch.channels_last).requires_grad_()
    tensors = {"a": weight, "b": weight, "step": torch.tensor(3), "none": torch.zeros(0), "also": torch.zeros(0)}
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    copies = HostCopy(tensors).wait()
    with torch.no_grad():
        weight += 1
        tensors["step"] += 1
    assert all(torch.equal(copies[name], before[name]) for name in tensors)
    assert copies["a"] is copies["b"] and copies["none"] is not copies["also"]
    assert copies["a"].is_contiguous(memory_format=torch.channels_last) and not copies["a"].requires_grad
