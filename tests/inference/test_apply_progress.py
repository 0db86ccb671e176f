"""The progress of `apply`: how much is done, how fast this command computes, and how long the rest takes."""

from __future__ import annotations

import pytest

from paceline.inference import apply


def test_pixels_of_an_earlier_command_count_as_done_but_not_for_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(apply.time, "monotonic", lambda: now)
    progress = apply.ApplyProgress(400_000_000)
    now += 20
    progress.advance(200_000_000, earlier=True)
    assert progress.describe() == "applying: 50% of 400 megapixels, 0 megapixels/s"
    now += 80
    progress.advance(50_000_000)
    assert progress.describe() == "applying: 62% of 400 megapixels, 0.5 megapixels/s, 5:00 left"
