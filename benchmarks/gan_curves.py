"""Train dcgan and dual_gan on CIFAR-10 with several batch sizes, and draw the curves of FID and the Inception Score.

    python benchmarks/gan_curves.py batches --data-root cifar10.npz --inception inception.pt --out out
    python benchmarks/gan_curves.py quality --data-root cifar10.npz --inception inception.pt --out out
    python benchmarks/gan_curves.py batches --tiny --out out    # on a CPU: checks that everything runs

`batches` trains both recipes at batch 64, 128, 256 and 512, with learning rates scaled by the square root of the batch
size: once for the same number of images, and once for the same number of updates. At batch 128, or at the batch sizes
given with --several-seeds-at, there are three seeds.
`quality` trains dcgan with several settings that may improve FID, at the same batch size. --rows selects rows by name,
and trains them in the given order.

The Inception Score needs logits, which the Inception file does not provide: they come from a classifier, which is
trained on the same data first and kept as OUT/classifier.safetensors. OUT/results.json holds the curve of each row,
versions and hardware; it is written after every evaluation. OUT/TASK-FID.svg and OUT/TASK-IS.svg show the curves.
--part-minutes limits the time: run the same command again to resume. A row that was interrupted resumes exactly, and
rows that results.json lists as complete are not repeated, even if their folders are gone. Arguments after `--` are
passed to every training run of a GAN.

--jobs trains several rows at the same time on one GPU. Use it with CUDA MPS only, since processes that share a GPU
without it slow each other down. The speeds in results.json are then those of rows that share the GPU.

--data-root is the folder for the source cifar10, or an .npz file with x_train, y_train, x_test and y_test.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from _gan_plots import Group, draw
from _gan_runs import Results, copy_samples, curve, data_words, name_in, points_of, run_rows, train, value_of
from _timed_training import Deadline, Stopped, run_paceline, sets, split_arguments

from paceline.report.plots import Axis

RECIPES = ("dcgan", "dual_gan")
BATCHES, SEVERAL_SEEDS_AT = (64, 128, 256, 512), (128,)
SEEDS = {"batches": (0, 1, 2), "quality": (0,)}
IMAGES = {"batches": 2_000_000, "quality": 8_000_000}
METRICS = ("FID", "IS")
TINY = ("ngf=4", "ndf=4", "nz=8")
TINY_BATCHES = (8, 16)
BATCH = "batch_size="
SIDE_PX, CHANNELS = 32, 3  # of the presets


class Row(NamedTuple):
    """A training run. Rows of the same group differ in their seeds only."""

    name: str
    group: str
    recipe: str
    settings: tuple[str, ...]
    images: int
    seed: int = 0


# By preset. The half-life is fixed, so that rows of different lengths differ in nothing else.
EMA = {"cifar10": ("ema_half_life=50k images",)}
# Each adds to the preset cifar10, which has an EMA. In the rows with _DECAY, the learning rate decays to zero.
_DECAY = ("schedule=cosine", "ema_half_life=3%")
_WIDE = ("ngf=128", "ndf=128")
_NO_NORM = ("d_norm=none", "beta1=0", "beta2=0.99")
QUALITY = {
    "ema": (),
    "flip": ("flip=on",),
    "constant-wide-flip": (*_WIDE, "flip=on"),
    "constant-wide-ada": (*_WIDE, "flip=on", "ada=blit,geometry,color", "ada_images=500000"),
    "constant-wide-r1": (*_WIDE, *_NO_NORM, "flip=on", "r1=0.1"),
    "decay": _DECAY,
    "wide": (*_DECAY, *_WIDE),
    "wide-flip": (*_DECAY, *_WIDE, "flip=on"),
    "wide-ada": (*_DECAY, *_WIDE, "flip=on", "ada=blit,geometry,color"),
    "r1": (*_DECAY, *_WIDE, *_NO_NORM, "flip=on", "r1=0.1"),
    "spectral-hinge": (
        *_DECAY,
        *_WIDE,
        *("d_norm=none", "beta1=0", "beta2=0.9", "flip=on", "spectral_norm=true", "objective=hinge"),
        "discriminator.lr=4e-4",
    ),
}


def rows_of(task: str, options: argparse.Namespace) -> list[Row]:
    """Return the rows of a task."""
    if task == "quality":
        return [
            Row(f"quality-{name}-{seed}", name, "dcgan", settings, options.images, seed)
            for name, settings in QUALITY.items()
            for seed in options.seeds
        ]
    rows = []
    for recipe in RECIPES:
        for batch in options.batches:
            scaled = (f"{BATCH}{batch}", "scale_lr=sqrt")
            for seed in options.seeds if batch in options.several_seeds_at else options.seeds[:1]:
                name = f"{recipe}-{batch}-images-{seed}"
                rows.append(Row(name, f"{recipe}, batch {batch}", recipe, scaled, options.images, seed))
    for recipe in RECIPES:
        for batch in options.batches[1:]:  # at the first batch size, both lengths are the same
            scaled = (f"{BATCH}{batch}", "scale_lr=sqrt")
            images = options.images * batch // options.batches[0]
            name = f"{recipe}-{batch}-updates-{options.seeds[0]}"
            rows.append(Row(name, f"{recipe}, batch {batch}", recipe, scaled, images, options.seeds[0]))
    return rows


class Benchmark:
    """Trains rows and records their curves."""

    def __init__(self, options: argparse.Namespace, results: Results) -> None:
        self.options, self.results = options, results
        self.deadline = Deadline(options.part_minutes)

    def run(self, row: Row) -> None:
        """Train a row, or resume it."""
        found = self.results.row(row.name)
        if found.get("is_complete"):
            trained_with = found["images"], tuple(found["settings"]), found["extra"]
            if trained_with != (row.images, row.settings, self.options.extra):
                sys.exit("it is complete with another length, other settings or other arguments: use a new --out")
            print(f"{row.name}: complete")
            return
        self.deadline.check()
        folder, num_jobs = self.options.out / row.name, self.options.jobs

        def save_curve() -> None:
            self.results.update(row.name, **row._asdict(), extra=self.options.extra, curve=curve(folder))

        words = [row.recipe, "--preset", self.options.preset, *data_words(self.options.data_root)]
        words += ["--images", str(row.images), "--seed", str(row.seed)]
        words += ["--inception", self.options.inception] if self.options.inception else []
        settings = [
            *EMA.get(self.options.preset, ()),
            *row.settings,
            f"features={self.classifier_file}",
            f"generated_images={self.options.generated}",
            f"evaluate_every={100 / self.options.evaluations:g}%",
            *("sample_every=100%", "save_every=50%", "few_images=allow", "compile=off"),
            *(TINY if self.options.tiny else ()),
        ]
        label = f"{row.name}: " if num_jobs > 1 else ""
        trained = train(folder, [*words, *sets(settings), *self.options.extra], self.deadline, save_curve, label)
        save_curve()
        copy_samples(folder, folder.with_suffix(".png"))
        self.results.update(row.name, training=trained, jobs=num_jobs, is_complete=True)

    @property
    def classifier_file(self) -> Path:
        """The weights of the classifier for the Inception Score."""
        path: Path = self.options.out / "classifier.safetensors"
        return path

    def train_classifier(self) -> None:
        """Train the classifier, unless its weights exist."""
        if self.classifier_file.is_file():
            return
        folder = self.options.out / "classifier"
        words = ["train", "classification", "--preset", "accurate", *data_words(self.options.data_root)]
        words += ["--epochs", str(self.options.classifier_epochs), "--seed", "0", "--out", str(folder)]
        settings = ["evaluate_every=50%", "save_every=50%", "compile=off", f"size={SIDE_PX}", f"channels={CHANNELS}"]
        if self.options.tiny:
            settings += ["width=8", "batch_size=16", "warmup=0%", "validation=0"]
        run_paceline(*words, *sets(settings), deadline=self.deadline)
        last = max((folder / "checkpoints").iterdir())
        partial = self.classifier_file.with_suffix(".partial")
        shutil.copyfile(last / "weights.safetensors", partial)
        os.replace(partial, self.classifier_file)


def write_random_images(path: Path) -> None:
    """Write a few random images in CIFAR-10's shape."""
    images = np.random.default_rng(0).integers(256, size=(120, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(120) % 10
    np.savez(path, x_train=images, y_train=labels, x_test=images[:40], y_test=labels[:40])


def main() -> None:
    """Train the rows of a task within the given time; draw the curves and print the final metrics."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("batches", "quality"))
    parser.add_argument("--data-root", type=Path, help="folder of CIFAR-10, or an .npz file")
    parser.add_argument("--inception", default="", help="file with the 2015 Inception network")
    parser.add_argument("--preset", default="cifar10", help="preset of both recipes: cifar10 or cifar10_reference")
    parser.add_argument("--images", type=int, help="images of a row; 2,000,000 for batches, 8,000,000 for quality")
    parser.add_argument("--seeds", type=int, nargs="*", help="seeds; 0 1 2 for batches, 0 for quality")
    parser.add_argument(
        "--several-seeds-at", type=int, nargs="*", choices=BATCHES, default=SEVERAL_SEEDS_AT, help="batch sizes; 128"
    )
    parser.add_argument("--evaluations", type=int, default=5, help="evaluations during a run")
    parser.add_argument("--generated", type=int, default=10_000, help="generated images per evaluation")
    parser.add_argument("--classifier-epochs", type=int, default=20, help="length of the classifier's training")
    parser.add_argument("--rows", nargs="*", default=[], help="names of the rows to train; all if omitted")
    parser.add_argument("--list", action="store_true", help="print the names of the rows, and exit")
    parser.add_argument("--jobs", type=int, default=1, help="rows that are trained at the same time")
    parser.add_argument("--part-minutes", type=float, default=0, help="stop after this time; 0: do not stop")
    parser.add_argument("--tiny", action="store_true", help="tiny networks and random images, to test on a CPU")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs, results.json and plots")
    own, extra = split_arguments()
    options = parser.parse_args(own)
    options.extra = extra
    options.batches = BATCHES
    options.seeds = options.seeds or SEEDS[options.task]
    options.images = options.images or IMAGES[options.task]
    if options.tiny:
        options.batches, options.several_seeds_at = TINY_BATCHES, TINY_BATCHES[1:]
        options.images, options.generated, options.classifier_epochs = 160, 40, 1
        options.data_root = options.out / "random.npz"
    elif not options.data_root and not options.list:
        parser.error("--data-root is required")
    rows = rows_of(options.task, options)
    by_name = {row.name: row for row in rows}
    unknown = set(options.rows) - set(by_name)
    if unknown:
        parser.error(f"--rows {' '.join(sorted(unknown))}: no such row; --list prints the names")
    chosen = [by_name[name] for name in options.rows] or rows
    if options.list:
        print(*(f"{row.name:32} {row.images:>12,} images  {' '.join(row.settings)}" for row in chosen), sep="\n")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    if options.tiny:
        write_random_images(options.data_root)
    results = Results(options.out / "results.json")
    benchmark = Benchmark(options, results)
    try:
        if not all(results.row(row.name).get("is_complete") for row in chosen):
            benchmark.train_classifier()
    except Stopped:
        print("stopped; run the same command again to resume")
        return
    failed = run_rows(chosen, benchmark.run, options.jobs, lambda: draw_all(options, rows, results))
    for row in chosen:
        print_row(row, results)
    sys.exit(1 if failed else 0)


def draw_all(options: argparse.Namespace, rows: Sequence[Row], results: Results) -> None:
    """Draw the curves of all metrics, over images and, for rows with equal updates, over updates."""
    if options.task == "quality":
        draw_metrics(options, "quality", rows, results)
        return
    draw_metrics(options, "batches-images", [row for row in rows if "-images-" in row.name], results)
    # At the first batch size, rows of equal length also have equal updates.
    equal = [row for row in rows if "-updates-" in row.name or batch_of(row) == options.batches[0]]
    draw_metrics(options, "batches-updates", equal, results, over_updates=True)


def draw_metrics(
    options: argparse.Namespace, name: str, rows: Sequence[Row], results: Results, *, over_updates: bool = False
) -> None:
    """Draw the curves of all metrics of some rows: a colour per batch size or setting, and dashes for dual_gan."""
    colours = list(dict.fromkeys(batch_of(row) or row.group for row in rows))
    for metric in METRICS:
        curves: dict[str, list[list[tuple[float, float]]]] = {}
        names: set[str] = set()
        for row in rows:
            found = results.row(row.name).get("curve", [])
            images_per_x = batch_of(row) if over_updates else 1
            points = [(images / images_per_x, value) for images, value in points_of(found, metric)]
            if points:
                curves.setdefault(row.group, []).append(points)
                names.add(name_in(found[0], metric) or metric)
        groups = [
            Group(row.group, curves[row.group], colours.index(batch_of(row) or row.group), row.recipe == "dual_gan")
            for row in {row.group: row for row in rows}.values()
            if row.group in curves
        ]
        unit = "updates" if over_updates else "images"
        title = f"{metric} during training, {options.generated:,} generated images"
        axes = Axis(f"training {unit}", unit), Axis(" or ".join(sorted(names)))
        draw(options.out / f"{name}-{metric}.svg", title, *axes, groups)


def batch_of(row: Row) -> int:
    """Return the batch size that a row sets; 0 if it uses the preset's."""
    return next((int(text.removeprefix(BATCH)) for text in row.settings if text.startswith(BATCH)), 0)


def print_row(row: Row, results: Results) -> None:
    """Print the speed and the curves of a row."""
    found = results.row(row.name)
    points = found.get("curve", [])
    shown = " ".join(
        f"{point['images'] / 1e6:.2f}M:" + "/".join(f"{value_of(point, metric) or 0:.2f}" for metric in METRICS)
        for point in points
    )
    speed = found.get("training", {}).get("images_per_second", 0)
    print(f"{row.name}: {speed:,.0f} images/s, {'/'.join(METRICS)} {shown or '-'}")


if __name__ == "__main__":
    main()
