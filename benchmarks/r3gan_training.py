"""Train r3gan on CIFAR-10 for a number of minutes on one GPU, and measure FID with 50,000 generated images.

    python benchmarks/r3gan_training.py candidates --data-root cifar10.npz --inception inception.pt --out out
    python benchmarks/r3gan_training.py unconditional --candidate batch-64 --minutes 17 --part-minutes 9 ...
    python benchmarks/r3gan_training.py conditional --candidate batch-64 --minutes 17 --part-minutes 9 ...
    python benchmarks/r3gan_training.py small --minutes 4 ...
    python benchmarks/r3gan_training.py candidates --tiny --out out    # on a CPU: checks that everything runs

`candidates` trains the unconditional model with each of several settings for --trial-seconds, with complete schedules,
and prints FID with 10,000 generated images. Choose one for `unconditional` and `conditional`. `small` trains on 2,000
images of one class with the preset `small`, without augmentation and with adaptive augmentation.

The number of images is computed from the speed, which a trial of --trial-images measures once per candidate. With
--part-minutes, the command stops after that time: run it again to resume exactly. OUT/results.json holds the speeds
and, for each row, the curve of FID during training, the final metrics, versions and hardware. It is written after every
evaluation. Rows that it lists as complete are not repeated. OUT/ROW.png shows samples, and OUT/TASK-FID.svg the curves.
Arguments after `--` are passed to every training run.

--jobs trains several rows at the same time on one GPU. Use it with --images, since speeds are not measured while rows
share the GPU, and with CUDA MPS, without which processes on one GPU slow each other down.

--data-root is the folder for the source cifar10, or an .npz file with x_train, y_train, x_test and y_test. `small`
needs an .npz file.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from _gan_plots import Group, draw
from _gan_runs import Results, copy_samples, curve, data_words, evaluate, points_of, run_rows, train, value_of
from _timed_training import Deadline, sets, split_arguments

from paceline.report.plots import Axis

SHARE_FOR_TRAINING = 0.95  # fraction of --minutes; the remaining time is for evaluations during training
NUM_SMALL, SMALL_CLASS = 2000, 7  # images of horses
EVALUATION_S = 60  # time for the final evaluation; if less is left, the next part evaluates
FEW_GENERATED = 10_000  # images for the evaluations during training
TINY = ("width=8", "num_blocks=1", "group_size=4", "size=16", "batch_size=8", "accelerator=cpu")

# Sizes of the networks and the batches. See benchmarks/README.md.
CANDIDATES = {
    "batch-64": ("batch_size=64",),
    "batch-256": ("batch_size=256",),
    "groups-64": ("batch_size=64", "group_size=32"),
    "narrow-64": ("batch_size=64", "group_size=32", "width=384"),
    "dense-64": ("batch_size=64", "expansion=1", "group_size=128"),
    "dense-128": ("batch_size=128", "expansion=1", "group_size=128"),
    "augmented-64": ("batch_size=64", "ada=blit,geometry,color,cutout", "ada_strength=0.25"),
}
TRIED = ("batch-64", "groups-64", "narrow-64")


class Row(NamedTuple):
    """A training run."""

    name: str
    preset: str
    settings: tuple[str, ...]
    speed_of: str  # rows with the same value have the same speed
    reach: str = ""  # goal, printed with the results
    label: str = ""  # in the plot; the name if empty


def rows_of(options: argparse.Namespace) -> list[Row]:
    """Return the runs of a task."""
    if options.task == "small":
        settings: tuple[str, ...] = ("size=32", "channels=3", "conditional=off", "r_gamma=0.01", "burn_in_r_gamma=0.1")
        settings += ("evaluate_every=10%", "sample_every=10%")  # often, to show when the discriminator overfits
        ada = ("ada=blit,geometry,color", "ada_images=100000")
        return [
            Row("small-plain", "small", (*settings, "ada="), "small", label="without augmentation"),
            Row("small-adaptive", "small", (*settings, *ada), "small", label="with adaptive augmentation"),
        ]
    cadence: tuple[str, ...] = ("evaluate_every=20%", "sample_every=20%", "save_every=10%")
    if options.task == "candidates":
        cadence = ("evaluate_every=50%", "sample_every=100%", "save_every=100%", "conditional=off")
        return [Row(f"candidate-{name}", "cifar10", (*CANDIDATES[name], *cadence), name) for name in options.tried]
    if options.task == "conditional":
        conditional, reach = "on", "FID ≤ 11, ideally ≤ 7"
    else:
        conditional, reach = "off", "FID ≤ 15, ideally ≤ 9"
    settings = (*CANDIDATES[options.candidate], *cadence, f"conditional={conditional}")
    return [Row(f"{options.task}-{options.candidate}", "cifar10", settings, options.candidate, reach)]


class Benchmark:
    """Trains and evaluates rows, and records the results."""

    def __init__(self, options: argparse.Namespace, data: Path, results: Results) -> None:
        self.options, self.results = options, results
        self.deadline = Deadline(options.part_minutes)
        self.inception = ["--inception", options.inception] if options.inception else []
        self.data = data_words(data)

    def run(self, row: Row) -> None:
        """Train a row, evaluate it and generate a grid of samples."""
        folder, found = self.options.out / row.name, self.results.row(row.name)
        if found.get("is_complete"):
            trained_with = tuple(found["settings"]), found["extra"], found.get("seed", 0)
            if trained_with != (row.settings, self.options.extra, self.options.seed):
                sys.exit("it is complete with other settings, arguments or another seed: use a new --out")
            print(f"{row.name}: complete")
            return
        self.deadline.check()
        if not (self.results.row(row.name).get("training") and folder.is_dir()):
            self.train(row, folder)
        if self.options.task == "candidates":
            metrics = curve(folder)[-1]
        else:
            settings = (f"generated_images={self.options.generated}", "few_images=allow", *self.options.evaluation)
            self.deadline.check(0 if self.options.tiny else EVALUATION_S)
            metrics = evaluate(folder, [*self.inception, *sets(settings)])
        self.results.update(row.name, metrics=metrics, is_complete=True)

    def train(self, row: Row, folder: Path) -> None:
        """Train a row to its end, or resume it, and record its curve, time and speed."""
        words = self.words(row, self.num_images(row))

        def save_curve() -> None:
            started_with = {"settings": row.settings, "extra": self.options.extra, "seed": self.options.seed}
            self.results.update(row.name, **started_with, curve=curve(folder))

        label = f"{row.name}: " if self.options.jobs > 1 else ""
        trained = train(folder, [*words, *self.inception], self.deadline, save_curve, label)
        save_curve()
        copy_samples(folder, folder.with_suffix(".png"))
        self.results.update(row.name, training=trained)

    def num_images(self, row: Row) -> int:
        """Return the length of a run; it is stored, so that a resumed run has the same schedules."""
        planned = self.results.row(row.name).get("planned_images")
        if planned is None:
            seconds = 60 * self.options.minutes * SHARE_FOR_TRAINING
            if self.options.task == "candidates":
                seconds = self.options.trial_seconds
            planned = self.options.images or max(1, int(self.speed(row) * seconds))
            self.results.update(row.name, planned_images=planned)
        return int(planned)

    def speed(self, row: Row) -> float:
        """Return the training speed in images/s, from a short run without evaluations."""
        speeds: dict[str, float] = self.results.content.setdefault("images_per_second", {})
        name = " ".join((row.speed_of, *self.options.extra))
        if name not in speeds:
            trial = self.options.out / "trial"
            shutil.rmtree(trial, ignore_errors=True)  # an interrupted trial is repeated from the start
            intervals = ("evaluate_every=never", "sample_every=never", "save_every=100%")
            words = self.words(row, self.options.trial_images, *intervals)
            speeds[name] = train(trial, words, self.deadline)["images_per_second"]
            shutil.rmtree(trial)
            self.results.write()
        return speeds[name]

    def words(self, row: Row, images: int, *more: str) -> list[str]:
        """Return the arguments of `paceline train` for a row."""
        words = ["r3gan", "--preset", row.preset, *self.data, "--images", str(images)]
        words += ["--seed", str(self.options.seed)]
        generated = min(FEW_GENERATED, self.options.generated)
        # Log rarely enough for speed, but often enough to measure it.
        settings = (*row.settings, f"generated_images={generated}", "few_images=allow", "log_every=50 steps")
        if "--compile" not in self.options.extra:
            settings += ("compile=off",)  # compiling takes minutes, again in each part
        return [*words, *sets((*settings, *more, *(TINY if self.options.tiny else ()))), *self.options.extra]


def write_one_class(source: Path, path: Path) -> None:
    """Write the first images of one class of an .npz file."""
    with np.load(source) as arrays:
        chosen = np.flatnonzero(arrays["y_train"] == SMALL_CLASS)[:NUM_SMALL]
        images = arrays["x_train"][chosen]
    labels = np.zeros(len(images), np.int64)
    np.savez(path, x_train=images, y_train=labels, x_test=images[:64], y_test=labels[:64])


def write_random_images(path: Path) -> None:
    """Write a few random images in CIFAR-10's shape."""
    images = np.random.default_rng(0).integers(256, size=(200, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(200) % 10
    np.savez(path, x_train=images, y_train=labels, x_test=images[:64], y_test=labels[:64])


def main() -> None:
    """Train and evaluate the rows of a task; print their metrics."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("candidates", "unconditional", "conditional", "small"))
    parser.add_argument("--data-root", type=Path, help="folder of CIFAR-10, or an .npz file")
    parser.add_argument("--inception", default="", help="file with the 2015 Inception network")
    parser.add_argument("--candidate", choices=CANDIDATES, default="batch-64", help="settings of the networks")
    parser.add_argument("--tried", nargs="*", choices=CANDIDATES, default=TRIED, help="settings that are compared")
    parser.add_argument("--trial-seconds", type=float, default=75, help="training time of a candidate")
    parser.add_argument("--trial-images", type=int, default=100_000, help="images to measure the speed")
    parser.add_argument("--minutes", type=float, default=17, help="training time of a run, unless --images is given")
    parser.add_argument("--part-minutes", type=float, default=0, help="stop after this time; 0: do not stop")
    parser.add_argument("--images", type=int, default=0, help="number of images to train on")
    parser.add_argument("--generated", type=int, default=50_000, help="number of generated images for the final FID")
    parser.add_argument("--evaluation", nargs="*", default=[], help="settings for the final evaluation")
    parser.add_argument("--seed", type=int, default=0, help="seed of the runs")
    parser.add_argument("--jobs", type=int, default=1, help="rows that are trained at the same time")
    parser.add_argument("--tiny", action="store_true", help="tiny networks and random images, to test on a CPU")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs and results.json")
    own, extra = split_arguments()
    options = parser.parse_args(own)
    options.extra, options.evaluation = extra, tuple(options.evaluation)
    if not options.data_root and not options.tiny:
        parser.error("--data-root is required")
    if options.jobs > 1 and not options.images:
        parser.error("--jobs needs --images")
    if options.task == "small" and options.data_root and options.data_root.suffix != ".npz":
        parser.error(f"--data-root {options.data_root}: small needs an .npz file")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.tiny:
        options.generated, options.trial_images, options.trial_seconds = 64, 1200, min(5.0, options.trial_seconds)
        options.data_root = options.out / "random.npz"
        write_random_images(options.data_root)
    data = options.data_root
    if options.task == "small":
        data = options.out / "one_class.npz"
        write_one_class(options.data_root, data)
    results = Results(options.out / "results.json")
    benchmark = Benchmark(options, data, results)
    rows = rows_of(options)
    failed = run_rows(rows, benchmark.run, options.jobs, lambda: draw_curves(options, rows, results))
    for row in rows:
        print_row(row, results)
    sys.exit(1 if failed else 0)


def draw_curves(options: argparse.Namespace, rows: Sequence[Row], results: Results) -> None:
    """Draw the curves of FID during training."""
    found = [results.row(row.name).get("curve", []) for row in rows]
    groups = [
        Group(row.label or row.name, [points_of(curve, "FID")], number)
        for number, (row, curve) in enumerate(zip(rows, found, strict=True))
    ]
    title = f"FID during training, {min(FEW_GENERATED, options.generated):,} generated images"
    draw(options.out / f"{options.task}-FID.svg", title, Axis("training images", "images"), Axis("FID"), groups)


def print_row(row: Row, results: Results) -> None:
    """Print the speed, the curve of FID and the final FID of a row."""
    found = results.row(row.name)
    training = found.get("training", {})
    fids = " ".join(f"{images / 1e6:.2f}M:{fid:.2f}" for images, fid in points_of(found.get("curve", []), "FID"))
    final = value_of(found.get("metrics", {}), "FID")
    print(
        f"{row.name}: {training.get('images_per_second', 0):,.0f} images/s, {training.get('images', 0):,} images, "
        f"FID during training {fids or '-'}, final FID {final if final is not None else '-'}"
        + (f" (goal: {row.reach})" if row.reach else "")
    )


if __name__ == "__main__":
    main()
