"""Replace CUDA graphs of a function, in tests that run without a GPU."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from paceline.parallel import graphed_function


def replace_captures(monkeypatch: pytest.MonkeyPatch, captured: type) -> None:
    """Use another class for captured graphs, and replace everything that needs a GPU during a capture."""
    monkeypatch.setattr(graphed_function, "CapturedGraph", captured)
    monkeypatch.setattr(graphed_function, "end_broken_capture", lambda *_: None)
    monkeypatch.setattr(graphed_function, "own_generator_state", lambda _: nullcontext())
    for name in ("current_stream", "graph_pool_handle", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
