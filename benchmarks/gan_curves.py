"""Train dcgan and dual_gan on CIFAR-10 with several batch sizes, and draw the curves of FID and the Inception Score.

    python benchmarks/gan_curves.py batches --data-root cifar10.npz --inception inception.pt --minutes 9 --out out
    python benchmarks/gan_curves.py quality --data-root cifar10.npz --inception inception.pt --minutes 9 --out out
    python benchmarks/gan_curves.py batches --tiny --out out    # on a CPU: checks that everything runs

`batches` trains both recipes at batch 64, 128, 256 and 512, with learning rates scaled by the square root of the batch
size: once for the same number of images, and once for the same number of updates. At batch 128, there are three seeds.
`quality` trains dcgan with several settings that may improve FID, at the same batch size. --rows selects rows by name.

The Inception Score needs logits, which the Inception file does not provide: they come from a classifier, which is
trained on the same data first. OUT/results.json holds the curve of each row, versions and hardware; it is written after
every evaluation. OUT/TASK-FID.svg and OUT/TASK-IS.svg show the curves. --minutes limits the time: run the same command
again to resume. A row that was interrupted resumes exactly, and rows that results.json lists as complete are not
repeated, even if their folders are gone. Arguments after `--` are passed to every training run.

--data-root is the folder for the source cifar10, or an .npz file with x_train, y_train, x_test and y_test.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _gan_runs import Results, copy_samples, curve, data_words, train, value_of
from _timed_training import Deadline, Stopped, run_paceline, sets, split_arguments
from markupsafe import escape

from paceline.core.files import write_file
from paceline.report.svg import HEIGHT, WIDTH, Axis, Series, group_colour, lines

RECIPES = ("dcgan", "dual_gan")
BATCHES, SEEDS, SEVERAL_SEEDS_AT = (64, 128, 256, 512), (0, 1, 2), 128
REFERENCE_BATCH = 64  # of the presets
METRICS = {"FID": "FID, 10,000 images", "IS": "Inception Score"}
TINY = ("ngf=4", "ndf=4", "nz=8")
TINY_BATCHES = (8, 16)


class Row(NamedTuple):
    """A training run. Rows of the same group are drawn in one colour."""

    name: str
    group: str
    recipe: str
    settings: tuple[str, ...]
    images: int
    seed: int = 0


# Each adds to the preset cifar10, which has an EMA. The learning rate decays to zero in all but the first.
_DECAY = ("schedule=cosine", "ema_half_life=3%")
_WIDE = ("ngf=128", "ndf=128")
_NO_NORM = ("d_norm=none", "beta1=0", "beta2=0.99")
QUALITY = {
    "ema": (),
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
            Row(f"quality-{name}", name, "dcgan", settings, options.images, seed)
            for name, settings in QUALITY.items()
            for seed in options.seeds[:1]
        ]
    rows = []
    for recipe in RECIPES:
        for batch in options.batches:
            scaled = (f"batch_size={batch}", "scale_lr=sqrt")
            for seed in options.seeds if batch == options.several_seeds_at else options.seeds[:1]:
                name = f"{recipe}-{batch}-images-{seed}"
                rows.append(Row(name, f"{recipe}, batch {batch}", recipe, scaled, options.images, seed))
    for recipe in RECIPES:
        for batch in options.batches[1:]:  # at the first batch size, both lengths are the same
            scaled = (f"batch_size={batch}", "scale_lr=sqrt")
            images = options.images * batch // options.batches[0]
            name = f"{recipe}-{batch}-updates-{options.seeds[0]}"
            rows.append(Row(name, f"{recipe}, batch {batch}, equal updates", recipe, scaled, images, options.seeds[0]))
    return rows


class Benchmark:
    """Trains rows and records their curves."""

    def __init__(self, options: argparse.Namespace, results: Results) -> None:
        self.options, self.results = options, results
        self.deadline = Deadline(options.minutes)

    def run(self, row: Row) -> None:
        """Train a row, or resume it."""
        if self.results.row(row.name).get("is_complete"):
            print(f"{row.name}: complete")
            return
        self.deadline.check()
        folder = self.options.out / row.name

        def save_curve() -> None:
            self.results.update(row.name, **row._asdict(), extra=self.options.extra, curve=curve(folder))

        words = [row.recipe, "--preset", self.options.preset, *data_words(self.options.data_root)]
        words += ["--images", str(row.images), "--seed", str(row.seed)]
        words += ["--inception", self.options.inception] if self.options.inception else []
        settings = [
            *row.settings,
            f"features={self.classifier()}",
            f"generated_images={self.options.generated}",
            f"evaluate_every={100 / self.options.evaluations:g}%",
            *("sample_every=100%", "save_every=50%", "few_images=allow", "compile=off"),
            *(TINY if self.options.tiny else ()),
        ]
        trained = train(folder, [*words, *sets(settings), *self.options.extra], self.deadline, save_curve)
        save_curve()
        copy_samples(folder, folder.with_suffix(".png"))
        self.results.update(row.name, training=trained, is_complete=True)

    def classifier(self) -> Path:
        """Return a classifier for the Inception Score, which is trained if necessary."""
        folder: Path = self.options.out / "classifier"
        words = ["train", "classification", "--preset", "accurate", *data_words(self.options.data_root)]
        words += ["--epochs", str(self.options.classifier_epochs), "--seed", "0", "--out", str(folder)]
        settings = ["evaluate_every=50%", "save_every=50%", "compile=off"]
        if self.options.tiny:
            settings += ["width=8", "batch_size=16", "warmup=0%", "validation=0"]
        done = self.options.out / "classifier.done"
        if not done.is_file():
            run_paceline(*words, *sets(settings), deadline=self.deadline)
            done.touch()
        return folder


def draw(path: Path, metric: str, rows: Sequence[dict[str, Any]]) -> None:
    """Draw the curves of a metric as an SVG file: a line per seed, and a thick line for the mean of several seeds."""
    groups: dict[str, list[list[tuple[float, float]]]] = {}
    for row in rows:
        values = [(point["images"], value_of(point, metric)) for point in row.get("curve", [])]
        points = [(images, value) for images, value in values if value is not None]
        if points:
            groups.setdefault(row["group"], []).append(points)
    series = []
    for number, (group, curves) in enumerate(groups.items()):
        colour, is_mean = group_colour(number), len(curves) > 1
        series += [Series(group, points, colour, thin=is_mean) for points in curves]
        if is_mean:
            means = [
                (at[0][0], sum(value for _, value in at) / len(at)) for at in zip(*curves, strict=False) if len(at) > 1
            ]
            series.append(Series(f"{group}, mean of {len(curves)}", means, colour))
    if series:
        plot = lines(f"{metric} over training images", Axis("training images", "images"), Axis(METRICS[metric]), series)
        write_file(path, standalone(str(plot), list(groups)))


def standalone(svg: str, labels: Sequence[str]) -> str:
    """Return a plot of a report as a file of its own, with its style and a legend below it."""
    style = files("paceline.report").joinpath("templates/report.css").read_text()
    legend = ""
    for number, label in enumerate(labels):
        x, y = 8 + WIDTH // 2 * (number % 2), HEIGHT + 18 * (number // 2)
        legend += f'<rect class="bar {group_colour(number)}" x="{x}" y="{y}" width="14" height="4"/>'
        legend += f'<text class="tick" x="{x + 20}" y="{y + 6}">{escape(label)}</text>'
    height = HEIGHT + 18 * ((len(labels) + 1) // 2) + 8
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{2 * WIDTH}"'
    _, _, rest = svg.partition(">")
    paper = f'<rect width="{WIDTH}" height="{height}" style="fill: var(--card)"/>'
    body = rest.removesuffix("</svg>")
    return f'{opening} style="font-family: system-ui, sans-serif"><style>{style}</style>{paper}{body}{legend}</svg>\n'


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
    parser.add_argument("--images", type=int, help="images of a row: 2,000,000 for batches, 8,000,000 for quality")
    parser.add_argument("--evaluations", type=int, default=5, help="evaluations during a run")
    parser.add_argument("--generated", type=int, default=10_000, help="generated images per evaluation")
    parser.add_argument("--classifier-epochs", type=int, default=20, help="length of the classifier's training")
    parser.add_argument("--rows", nargs="*", default=[], help="names of the rows to train; all if omitted")
    parser.add_argument("--list", action="store_true", help="print the names of the rows, and exit")
    parser.add_argument("--minutes", type=float, default=0, help="stop after this time; 0: do not stop")
    parser.add_argument("--tiny", action="store_true", help="tiny networks and random images, to test on a CPU")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs, results.json and plots")
    own, extra = split_arguments()
    options = parser.parse_args(own)
    options.extra = extra
    options.batches, options.several_seeds_at, options.seeds = BATCHES, SEVERAL_SEEDS_AT, SEEDS
    options.images = options.images or {"batches": 2_000_000, "quality": 8_000_000}[options.task]
    options.out.mkdir(parents=True, exist_ok=True)
    if options.tiny:
        options.batches, options.several_seeds_at, options.seeds = TINY_BATCHES, TINY_BATCHES[1], SEEDS[:2]
        options.images, options.generated, options.classifier_epochs = 160, 40, 1
        options.data_root = options.out / "random.npz"
        write_random_images(options.data_root)
    elif not options.data_root and not options.list:
        parser.error("--data-root is required")
    rows = [row for row in rows_of(options.task, options) if not options.rows or row.name in options.rows]
    if options.list:
        print(*(f"{row.name:32} {row.images:>12,} images  {' '.join(row.settings)}" for row in rows), sep="\n")
        return
    results = Results(options.out / "results.json")
    benchmark = Benchmark(options, results)
    try:
        for row in rows:
            benchmark.run(row)
            draw_all(options, rows, results)
    except Stopped:
        print("stopped; run the same command again to resume")
    draw_all(options, rows, results)
    for row in rows:
        print_row(row, results)


def draw_all(options: argparse.Namespace, rows: Sequence[Row], results: Results) -> None:
    """Draw the curves of all metrics; rows with equal updates have their own plot."""
    kinds = {"images": [], "updates": []} if options.task == "batches" else {"": []}
    for row in rows:
        kind = row.name.split("-")[2] if options.task == "batches" else ""
        kinds[kind].append(results.row(row.name) | {"group": row.group.removesuffix(", equal updates")})
    for kind, found in kinds.items():
        name = "-".join(filter(None, (options.task, kind)))
        for metric in METRICS:
            draw(options.out / f"{name}-{metric}.svg", metric, found)


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
