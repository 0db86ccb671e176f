"""The sample images in a report: real images next to generated ones, and the progress over training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.report.model import Gallery, Group, Sample
from paceline.report.run import Run, SampleFile

NUM_STAGES = 6  # maximum number of images that show the progress of one run


def samples_of(groups: Mapping[str, Group], runs: Sequence[Run]) -> list[Sample]:
    """Return real images if a run saved them, then the last samples of each group's first run."""
    real = [Sample("real images", run.real_images) for run in runs if run.real_images]
    last = [Sample(_caption(group, run, run.samples[-1]), run.samples[-1].path) for group, run in _firsts(groups, runs)]
    return [*real[:1], *last] if last else []


def progress_of(groups: Mapping[str, Group], runs: Sequence[Run]) -> list[Gallery]:
    """Return samples from several points in the training of each group's first run."""
    found = []
    for group, run in _firsts(groups, runs):
        stages = [Sample(f"{one.images:,} images", one.path) for one in _spread_out(run.samples)]
        if len(stages) > 1:
            found.append(Gallery(f"{group.label}, seed {run.seed}", stages))
    return found


def _firsts(groups: Mapping[str, Group], runs: Sequence[Run]) -> list[tuple[Group, Run]]:
    by_folder = {run.folder: run for run in runs}
    firsts = [(group, by_folder[group.runs[0]]) for group in groups.values()]
    return [(group, run) for group, run in firsts if run.samples]


def _caption(group: Group, run: Run, sample: SampleFile) -> str:
    return f"{group.label}, seed {run.seed}, after {sample.images:,} images"


def _spread_out(samples: Sequence[SampleFile]) -> list[SampleFile]:
    """Return at most NUM_STAGES samples, from the first to the last."""
    steps = min(NUM_STAGES, len(samples)) - 1
    return [samples[round(number * (len(samples) - 1) / max(1, steps))] for number in range(steps + 1)]
