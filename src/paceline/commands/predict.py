"""`paceline predict`: which classes pictures show, by what a classifier learned."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from PIL import Image

from paceline.core.errors import UserError
from paceline.core.new_file import check_new, written_beside
from paceline.images.decode import BadImage, decode, upright_size
from paceline.inference.applier import Outcome
from paceline.inference.apply_plan import Meant, Plan, find_pictures
from paceline.inference.model import Model
from paceline.inference.trained import check_use, read_stored
from paceline.parallel.world import check_devices, uses_cuda
from paceline.runs.config import resolve_settings
from paceline.runs.stages import last_finished

SUFFIXES = (".csv", ".jsonl")
PICTURES_AT_ONCE = 32


class Guess(NamedTuple):
    """A class, and how likely a picture shows it."""

    name: str
    probability: float


def predict(
    path: str, words: list[str], top: int, out: str, checkpoint: str, accelerator: str, *, overwrite: bool = False
) -> int:
    """Prints the likeliest classes of each picture, and writes them to a file if asked; 1 if some could not be used."""
    if top < 1:
        raise UserError(f"--top {top}: expected a number of classes, 1 or more")
    target = check_new(out, SUFFIXES, overwrite=overwrite) if out else None
    device = _device(accelerator)
    path = last_finished(path)
    stored = read_stored(path, checkpoint)
    check_use(stored, "predict", path)
    made = Plan()
    pictures = find_pictures(words, made)
    model = Model(stored, path, device)
    top = min(top, len(model.classes))
    count = "1 picture" if len(pictures) == 1 else f"{len(pictures):,} pictures"
    header = f"{stored.config.recipe_name} from {model.origin}: {len(model.classes)} classes; {count} on {device}"
    print("\n".join([header, *made.notes]), flush=True)
    with ExitStack() as stack:
        writer = None
        if target:
            file = stack.enter_context(written_beside(target)).open(
                "w", newline="", encoding="utf-8", errors="surrogateescape"
            )
            writer = Rows(stack.enter_context(file), target.suffix, top)
        done = 0
        for name, guesses in _guesses(model, pictures, top, made.problems):
            done += 1
            print(f"{name}: {', '.join(f'{guess.name} ({guess.probability:.1%})' for guess in guesses)}", flush=True)
            if writer:
                writer.write(name, guesses)
    if target:
        print(f"{done:,} of {count} → {target}" if made.problems else f"{count} → {target}")
    for problem in made.problems:
        print(f"not used: {problem.path}: {problem.problem}", file=sys.stderr)
    if made.problems:
        total = done + len(made.problems)
        print(f"{done} of {total} pictures were done, {len(made.problems)} could not be used", file=sys.stderr)
    return 1 if made.problems else 0


def _device(accelerator: str) -> torch.device:
    settings = resolve_settings("predict", [("flag", {"accelerator": accelerator or "auto"})])
    check_devices(settings)
    return torch.device("cuda:0" if uses_cuda(settings) else "cpu")


def _guesses(
    model: Model, pictures: list[Meant], top: int, problems: list[Outcome]
) -> Iterator[tuple[str, list[Guess]]]:
    """The likeliest classes of each picture, by the picture's path; those that cannot be read become problems."""
    for start in range(0, len(pictures), PICTURES_AT_ONCE):
        names: list[str] = []
        found = model.predict(_read(pictures[start : start + PICTURES_AT_ONCE], names, problems))
        # Of classes that are equally likely, the one with the lower number comes first, as in evaluation.
        ranked = found.sort(dim=1, descending=True, stable=True)
        for name, probabilities, numbers in zip(names, ranked.values.tolist(), ranked.indices.tolist(), strict=True):
            likeliest = list(zip(numbers, probabilities, strict=True))[:top]
            yield name, [Guess(model.classes[number], probability) for number, probability in likeliest]


def _read(pictures: list[Meant], names: list[str], problems: list[Outcome]) -> Iterator[Image.Image]:
    """One picture after the other, since large ones fill the memory; `names` gets the path of each."""
    for one in pictures:
        try:
            upright_size(one.path)  # refuses what is animated or too large by its header
            picture = decode(one.path)
        except BadImage as problem:
            problems.append(Outcome(str(one.path), problem=str(problem)))
            continue
        names.append(str(one.path))
        yield picture


class Rows:
    """A file with a row for each picture."""

    def __init__(self, file: Any, suffix: str, top: int) -> None:
        self._file, self._table = file, csv.writer(file) if suffix == ".csv" else None
        if self._table:
            numbers = range(1, top + 1)
            self._table.writerow(["file", *(f"{what}_{n}" for n in numbers for what in ("class", "probability"))])

    def write(self, name: str, guesses: list[Guess]) -> None:
        """Adds a picture."""
        if self._table:
            self._table.writerow([name, *(value for guess in guesses for value in guess)])
        else:
            classes = [{"class": guess.name, "probability": guess.probability} for guess in guesses]
            self._file.write(json.dumps({"file": name, "classes": classes}, ensure_ascii=False) + "\n")
