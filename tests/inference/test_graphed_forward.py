"""CUDA graphs of a forward pass; their results are tested on a GPU."""

from __future__ import annotations

import pytest
import torch

from paceline.contracts.pixel_format import PixelFormat
from paceline.inference import graphed_forward
from paceline.inference.forward import Values
from paceline.inference.graphed_forward import GraphedForward


def test_a_failed_capture_is_noted_and_the_forward_pass_stays_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    monkeypatch.setattr(graphed_forward, "_Captured", fail)
    monkeypatch.setattr(graphed_forward, "end_broken_capture", lambda *_: None)
    for name in ("current_stream", "graph_pool_handle", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    forward = GraphedForward(lambda batch, _: Values({"image": batch * 2}, torch.tensor(True)), torch.device("cpu"))
    for _ in range(6):
        made = forward(torch.ones(1, 4, 4, 3), PixelFormat.full("uint8"))
    assert torch.equal(made.by_name["image"], torch.full((1, 4, 4, 3), 2.0))
    assert forward.note == (
        "CUDA graphs: off, because a capture failed (RuntimeError: operation not permitted when stream is capturing)"
    )
