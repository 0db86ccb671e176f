"""On a GPU, losses are logged while the next step runs. The log is the same as if the loop had waited for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import make_parts

from paceline.core.errors import UserError
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricsWriter, read_metrics
from paceline.runs.terminal import Display
from paceline.training.loop import Loop, Outputs

BATCH, STEPS = 4, 10


def make_loop(recipe: str, folder: Path, *, defers: bool, **settings: str) -> Loop:
    every = {"log_every": "2 steps", "save_every": "5 steps", "sample_every": "1000 steps"} | settings
    parts = make_parts(recipe, batch_size=str(BATCH), images=str(BATCH * STEPS), **every)
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


def test_the_log_has_the_same_lines_if_steps_are_profiled(tmp_path: Path, tiny: str) -> None:
    make_loop(tiny, tmp_path / "plain", defers=True).run()
    make_loop(tiny, tmp_path / "profiled", defers=True, profile="2").run()
    assert logged(tmp_path / "profiled") == logged(tmp_path / "plain")
    assert (tmp_path / "profiled" / "profile" / "summary.txt").is_file()


def test_a_loss_that_is_not_finite_is_reported_with_its_step_and_is_never_saved(tmp_path: Path, tiny: str) -> None:
    loop = make_loop(tiny, tmp_path, defers=True, not_finite_at="6")
    with pytest.raises(UserError, match=f"at step 6 \\({BATCH * 6} images seen\\)"):
        loop.run()
    assert loop.recorder.step == 8, "the log after 8 steps is read during the ninth"
    assert list(loop.outputs.folder.checkpoints.all()) == [BATCH * 5]


SIGNALLING = """
import sys
sys.path.insert(0, {folder!r})
from tiny import Tiny

class Signalling(Tiny):
    must_vary = ("classifier/range",)

    def classifier_loss(self, batch):
        loss = super().classifier_loss(batch)
        step = self.calls - 1
        value = {value}
        return loss._replace(signals={{"range": loss.terms["cross_entropy"].detach() * 0 + value}})
"""


def signalling(folder: Path, value: str) -> str:
    """Write a recipe with a signal that must vary; `value` is its Python expression, in which `step` can be used."""
    file = folder / "signalling.py"
    file.write_text(SIGNALLING.format(folder=str(Path(__file__).parent.parent), value=value))
    return str(file)


@pytest.mark.parametrize("defers", [False, True])
def test_a_network_that_collapses_within_a_log_interval_is_not_saved(tmp_path: Path, defers: bool) -> None:
    recipe = signalling(tmp_path, "0 if step >= 8 else 1")
    loop = make_loop(recipe, tmp_path / "run", defers=defers, log_every="5 steps")
    with pytest.raises(UserError, match=r"constant \(classifier/range is 0\) at step 10 .* is at 20 images"):
        loop.run()
    assert loop.outputs.folder.checkpoints.all() == [BATCH * 5]


@pytest.mark.parametrize("defers", [False, True])
def test_a_value_that_must_vary_may_be_zero_in_a_few_steps(tmp_path: Path, defers: bool) -> None:
    recipe = signalling(tmp_path, "0 if step in (2, 7, 8) else 1")
    loop = make_loop(recipe, tmp_path / "run", defers=defers, log_every="4 steps")
    loop.run()
    assert loop.outputs.folder.checkpoints.all() == [BATCH * 5, BATCH * 10]


def test_a_value_that_is_zero_for_a_whole_log_interval_stops_the_run(tmp_path: Path) -> None:
    recipe = signalling(tmp_path, "0 if step >= 3 else 1")
    loop = make_loop(recipe, tmp_path / "run", defers=False, save_every="100 steps")
    with pytest.raises(UserError, match=r"constant \(classifier/range is 0\) at step 6 "):
        loop.run()


@pytest.mark.parametrize(
    "value",
    ["1e12 * (-1) ** step", "-2e8 if step == 7 else 1"],
    ids=["alternating signs, whose mean is zero", "a single step of many"],
)
def test_a_magnitude_above_the_limit_stops_the_run_before_it_is_saved(tmp_path: Path, value: str) -> None:
    loop = make_loop(signalling(tmp_path, value), tmp_path / "run", defers=True, log_every="10 steps")
    with pytest.raises(
        UserError, match=r"the run has diverged \(the magnitude of classifier/range is (1e\+12|2e\+08)\)"
    ):
        loop.run()
    assert loop.outputs.folder.checkpoints.all() == ([] if "1e12" in value else [BATCH * 5])
