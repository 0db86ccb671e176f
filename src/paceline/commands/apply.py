"""`paceline apply`: pictures of any size through what a run learned; several devices share the files."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from paceline.config.settings import RunSettings
from paceline.core.errors import UserError
from paceline.core.screen import open_screen
from paceline.images.decode import BadImage, upright_size
from paceline.inference.applier import Applier, How, Outcome, Task
from paceline.inference.applier_processes import share_out
from paceline.inference.apply_plan import plan
from paceline.inference.image_model import ImageModel, open_image_model
from paceline.parallel.world import check_devices, gpu_ids, uses_cuda
from paceline.runs.config import resolve_settings
from paceline.runs.stages import last_finished

SECONDS_BETWEEN_LINES = 10.0  # where there is no terminal to draw a bar on
PIXELS_IN_FULL = 10**6  # fewer are not told in megapixels
DOWNSAMPLED = ("", "lr", "bicubic", "sr")  # what `--downsample` writes of each picture


@dataclasses.dataclass(frozen=True)
class Options:
    """How a person wants it done."""

    checkpoint: str = "best"
    accelerator: str = ""
    devices: int = 1
    gpus: str = ""
    tile: int = 0
    downsample: str = ""
    overwrite: bool = False
    skip_existing: bool = False


def apply(path: str, words: list[str], out: str, options: Options) -> int:
    """Writes what a run or a weights file makes of each picture into a folder; 1 if some could not be used."""
    settings = _settings(options)
    path = last_finished(path)
    image_model = open_image_model(path, options.checkpoint)
    if options.downsample and image_model.output_scale == 1:
        raise UserError(
            f"--downsample {options.downsample}: {path} keeps the size of pictures; it is for enlarging ones"
        )
    folder = Path(out).expanduser()
    results = DOWNSAMPLED if options.downsample else _results(image_model)
    planned = plan(words, folder, results, overwrite=options.overwrite, skip_existing=options.skip_existing)
    devices = [f"cuda:{number}" for number in gpu_ids(settings)] if uses_cuda(settings) else ["cpu"] * settings.devices
    how = How(path, options.checkpoint, options.tile, options.downsample)
    print("\n".join([_describe(image_model, len(planned.tasks), devices), *planned.notes]), flush=True)
    usable, unusable = _look(planned.tasks)
    problems = [*planned.problems, *unusable]
    count = len(planned.tasks) + len(planned.problems)
    if usable:
        _make_folder(folder)
    done: list[Outcome] = []
    try:
        with _progress(sum(usable.values())) as shown:
            for outcome in _outcomes(how, image_model, list(usable), devices[: max(1, len(usable))], shown):
                (problems if outcome.problem else done).append(outcome)
                if outcome.line:
                    shown.line(outcome.line)
            shown.complete()
    except KeyboardInterrupt:
        # After --overwrite it would take older results for new ones.
        hint = "" if options.overwrite else "; --skip-existing goes on with the others"
        print(f"{len(done)} of {count} pictures were done{hint}", file=sys.stderr)
        raise
    _say_means(done)
    for problem in problems:
        print(f"not used: {problem.path}: {problem.problem}", file=sys.stderr)
    if problems:
        print(f"{len(done)} of {count} pictures were done, {len(problems)} could not be used", file=sys.stderr)
    return 1 if problems else 0


def _results(image_model: ImageModel) -> tuple[str, ...]:
    """The names of what is made of one picture; "" where there is one result."""
    names = tuple(image_model.results)
    return ("",) if len(names) == 1 else names


def _settings(options: Options) -> RunSettings:
    """The devices that are meant, checked against what is here."""
    flags = {"accelerator": options.accelerator or "auto", "devices": options.devices, "gpus": options.gpus}
    settings = resolve_settings("apply", [("flag", flags)])
    if options.tile < 0:
        raise UserError(f"--tile {options.tile}: expected the side of a tile in pixels, or 0 for what fits in memory")
    if options.downsample not in ("", "bicubic"):
        raise UserError(f"--downsample {options.downsample}: expected bicubic")
    if options.overwrite and options.skip_existing:
        raise UserError("--overwrite --skip-existing: choose one; they say opposite things of results that are there")
    if settings.gpus:
        number = len(gpu_ids(settings))
        if settings.devices not in (1, number):
            raise UserError(f"--devices {settings.devices}: --gpus {settings.gpus} names {number}")
        settings = dataclasses.replace(settings, devices=number)
    check_devices(settings)
    return settings


def _describe(image_model: ImageModel, count: int, devices: list[str]) -> str:
    kind = f"enlarges {image_model.output_scale} times" if image_model.output_scale > 1 else ""
    kind = kind or ("makes " + ", ".join(image_model.results) if len(image_model.results) > 1 else "keeps the size")
    where = devices[0] if len(devices) == 1 else f"{len(devices)} processes ({', '.join(devices)})"
    pictures = "1 picture" if count == 1 else f"{count:,} pictures"
    return f"{image_model.config.recipe_name} from {image_model.origin}: {kind}; {pictures} on {where}"


def _look(tasks: list[Task]) -> tuple[dict[Task, int], list[Outcome]]:
    """The tasks whose files have a usable header, with their pixels; and what is wrong with the others."""
    usable: dict[Task, int] = {}
    problems = []
    for task in tasks:
        try:
            height, width = upright_size(Path(task.path))
            usable[task] = height * width
        except BadImage as error:
            problems.append(Outcome(task.path, problem=str(error)))
    return usable, problems


def _make_folder(out: Path) -> None:
    """Makes the folder of results, and sees that files can be made in it, before the work begins."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written to: {error.strerror or error}") from None


def _outcomes(
    how: How, image_model: ImageModel, tasks: list[Task], devices: list[str], shown: Shown
) -> Iterator[Outcome]:
    if len(devices) > 1:
        yield from share_out(how, tasks, devices, shown.advance)
        return
    applier = Applier(how, image_model, torch.device(devices[0]))
    for task in tasks:
        yield applier.do(task, shown.advance)


def _say_means(done: list[Outcome]) -> None:
    """The means of what was measured, where there are several pictures."""
    measured = [outcome.numbers for outcome in done if outcome.numbers]
    if len(measured) > 1:
        for name in measured[0]:
            print(f"mean of {len(measured)}: {name} {sum(numbers[name] for numbers in measured) / len(measured):.4f}")


class Shown:
    """Progress for a person: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, total: int, bar: Progress | None) -> None:
        self._total, self._done, self._bar, self._said = total, 0, bar, time.monotonic()
        self._task = bar.add_task("applying", total=total) if bar else None

    def advance(self, pixels: int) -> None:
        """So many more pixels have been done."""
        self._done += pixels
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=self._done)
        elif time.monotonic() - self._said > SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            few = self._total < PIXELS_IN_FULL
            total = f"{self._total:,} pixels" if few else f"{self._total / 1e6:,.1f} megapixels"
            print(f"{self._done / max(self._total, 1):.0%} of {total}", flush=True)

    def complete(self) -> None:
        """No more will be done, also where pictures turned out to be unusable on the way."""
        self._done = self._total
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=self._done)

    def line(self, text: str) -> None:
        """Prints above the bar."""
        if self._bar:
            self._bar.console.print(text, soft_wrap=True)
        else:
            print(text, flush=True)
            self._said = time.monotonic()


@contextmanager
def _progress(total: int) -> Iterator[Shown]:
    if not sys.stdout.isatty():
        yield Shown(total, None)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=open_screen()) as bar:
        yield Shown(total, bar)
