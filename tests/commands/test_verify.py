"""`verify` reports differences on the screen and in a file, and rejects wrong input before any training."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
import torch

from paceline.commands import verify as verify_command
from paceline.commands.configure import configure
from paceline.commands.verify import Difference, compare, verify
from paceline.core.errors import UserError


def found(kind: str, value: float) -> Difference:
    tolerance = 1e-9 if kind == "weights" else 1e-12
    return Difference("ddp", kind, "classifier", value, tolerance, worst="conv.weight" if value > tolerance else "")


def test_the_names_of_tensors_are_whole_in_a_file_or_pipe(monkeypatch, capsys):
    config = configure("classification", {"data": "digits", "accelerator": "cpu"})
    tensor = "stages.0.blocks.1.convolution.weight"
    monkeypatch.setattr(verify_command, "differences", lambda *_: [replace(found("weights", 1e-6), worst=tensor)])
    assert verify(config, ["single", "ddp"], 2, 1e-9, "") == 1
    table, verdict = capsys.readouterr().out.split("✗")
    assert f" {tensor} " in table and "try --set optimizer=sgd" in verdict


def test_empty_tensors_are_not_compared():
    trace = {"weights//generator/weight": torch.ones(2), "weights//generator/empty": torch.ones(0)}
    (difference,) = compare({"single": trace, "ddp": trace}, 1e-9)
    assert difference.value == 0 and difference.ok


def test_the_differences_are_written_to_a_json_file(tmp_path, monkeypatch):
    config = configure("classification", {"data": "digits", "accelerator": "cpu"})
    monkeypatch.setattr(verify_command, "differences", lambda *_: [found("weights", 1e-15)])
    file = tmp_path / "new folder" / "differences.json"
    assert verify(config, ["single", "ddp"], 2, 1e-9, "", str(file)) == 0
    assert json.loads(file.read_text())["differences"][0]["value"] == 1e-15


@pytest.mark.parametrize("name", [".", "text/below/it.json", "fifo", "/proc/new/it.json"])
def test_a_json_file_that_cannot_be_created_is_reported_before_any_training(tmp_path, monkeypatch, name):
    monkeypatch.setattr(verify_command, "differences", pytest.fail)
    (tmp_path / "text").touch()
    os.mkfifo(tmp_path / "fifo")
    config = configure("classification", {"data": "digits", "accelerator": "cpu"})
    with pytest.raises(UserError, match=f"--json {tmp_path / name}: "):
        verify(config, ["single", "ddp"], 2, 1e-9, "", str(tmp_path / name))
    assert sorted(os.listdir(tmp_path)) == ["fifo", "text"]


def test_a_strategy_that_is_not_installed_is_reported_before_any_training(monkeypatch):
    monkeypatch.setattr("paceline.parallel.strategy.is_installed", lambda package: package != "lightning")
    config = configure("classification", {"data": "digits", "accelerator": "cpu"})
    with pytest.raises(
        UserError, match=r"--strategies single,ddp,lightning: .*paceline\[lightning\].* leave lightning"
    ):
        verify(config, ["single", "ddp", "lightning"], 2, 1e-9, "")
