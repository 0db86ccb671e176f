"""On a GPU, losses are logged while the next step runs. The log is the same as if the loop had waited for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import make_parts

from paceline.core.errors import UserError
from paceline.runs.display import Display
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricsWriter, read_metrics
from paceline.training.loop import Loop, Outputs

BATCH, STEPS = 4, 10


def make_loop(recipe: str, folder: Path, *, defers: bool, **settings: str) -> Loop:
    every = {"log_every": "2 steps", "save_every": "5 steps", "sample_every": "1000 steps"}
    parts = make_parts(recipe, batch_size=str(BATCH), images=str(BATCH * STEPS), **every, **settings)
    run = RunFolder(folder)
    run.claim()
    outputs = Outputs(run, MetricsWriter(folder), Display(parts.total_images, 0, "", enabled=False))
    loop = Loop(parts, outputs)
    loop.defers_log = defers
    return loop


def logged(folder: Path) -> list[dict[str, float]]:
    """Return the lines of the log without times."""
    return [
        {name: value for name, value in line.items() if not name.startswith(("time", "seconds", "host/"))}
        for line in read_metrics(folder)
    ]


def test_the_log_has_the_same_lines_if_it_is_deferred(tmp_path: Path, tiny: str) -> None:
    for name, defers in (("waits", False), ("defers", True)):
        make_loop(tiny, tmp_path / name, defers=defers).run()
    lines = logged(tmp_path / "defers")
    assert lines == logged(tmp_path / "waits")
    assert [line["images"] for line in lines] == [BATCH * step for step in (2, 4, 5, 6, 8, 10)]


def test_the_log_has_the_same_lines_if_the_profiler_delays_it_further(tmp_path: Path, tiny: str) -> None:
    make_loop(tiny, tmp_path / "plain", defers=True).run()
    loop = make_loop(tiny, tmp_path / "profiled", defers=True, profile="2")
    assert loop.profiler
    loop.profiler._may_delay_log = True  # as on a GPU
    loop.run()
    assert logged(tmp_path / "profiled") == logged(tmp_path / "plain")
    assert (tmp_path / "profiled" / "profile" / "summary.txt").is_file()


def test_a_loss_that_is_not_finite_is_reported_with_its_step_and_is_never_saved(tmp_path: Path, tiny: str) -> None:
    loop = make_loop(tiny, tmp_path, defers=True, not_finite_at="6")
    with pytest.raises(UserError, match=f"at step 6 \\({BATCH * 6} images seen\\)"):
        loop.run()
    assert loop.recorder.step == 8, "the log after 8 steps is read during the ninth"
    assert list(loop.outputs.folder.checkpoints.all()) == [BATCH * 5]
