"""The progress of `apply` in a log file: how much is done, and how fast this command computes."""

from __future__ import annotations

import pytest

from paceline.inference import apply
from paceline.inference.apply import show_progress


def test_pixels_of_an_earlier_command_count_as_done_but_not_for_the_speed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(apply.time, "monotonic", lambda: now)
    with show_progress(400_000_000) as progress:
        now += 20
        progress.advance(200_000_000, earlier=True)
        now += 80
        progress.advance(50_000_000)
    assert capsys.readouterr().out.splitlines() == [
        "50% of 400.0 megapixels",
        "62% of 400.0 megapixels, 0.5 megapixels/s",
    ]
