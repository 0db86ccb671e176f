"""Train r3gan on CIFAR-10 for a number of minutes on one GPU, and measure FID with 50,000 generated images.

    python benchmarks/r3gan_training.py unconditional --data-root data --inception inception.pt --minutes 18 --out out/u
    python benchmarks/r3gan_training.py conditional --data-root data --inception inception.pt --minutes 18 --out out/c
    python benchmarks/r3gan_training.py small --data-root data --inception inception.pt --minutes 8 --out out/small
    python benchmarks/r3gan_training.py dcgan --data-root data --inception inception.pt --minutes 8 --out out/dcgan

A short trial measures the training speed, and OUT/plan.json stores the number of images that fit into --minutes. With
--part-minutes, the command stops after that time: run it again to train the next part. A run resumes exactly. The
metrics of the last checkpoint, the curve of FID during training, versions and hardware are written to OUT/results.json,
and a grid of samples to OUT/grid.png. `small` trains on 2,000 images of one class twice: with and without adaptive
augmentation. Arguments after `--` are passed to every training run.

--data-root is the folder for the source cifar10, or an .npz file with x_train, y_train, x_test and y_test.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from _timed_training import Stopped, make_plan, paceline, printed_metrics, sets, split_arguments, summarise

from paceline.runs.metrics import read_metrics
from paceline.runs.provenance import versions_and_hardware

SHARE_FOR_TRAINING = 0.95  # fraction of --minutes; the remaining time is for evaluations during training
NUM_SMALL, SMALL_CLASS = 2000, 7  # images of horses
FEW_GENERATED = 10_000  # images for the evaluations during training


class Task(NamedTuple):
    """A recipe with its settings."""

    recipe: str
    preset: str
    settings: tuple[str, ...] = ()
    batch: int = 256
    reach: str = ""  # goal, printed with the results


TASKS = {
    "unconditional": Task("r3gan", "cifar10", ("conditional=off",), reach="FID ≤ 15, aim ≤ 9"),
    "conditional": Task("r3gan", "cifar10", ("conditional=on",), reach="FID ≤ 11, aim ≤ 7"),
    "dcgan": Task("dcgan", "cifar10", (), 64, "FID (10,000 images) ≤ 41, aim ≤ 37"),
    "small": Task("r3gan", "cifar10", ("conditional=off", "batch_size=64", "ema_half_life=50k images"), 64),
}
ADAPTIVE = ("ada=blit,geometry,color", "ada_images=100000")


def train(task: Task, folder: Path, images: int, options: argparse.Namespace, *more: str) -> dict[str, float]:
    """Train a run, or resume it; return the number of images, the training time and the median speed."""
    words = ["train", task.recipe, "--preset", task.preset, *options.data_words, "--images", str(images)]
    words += ["--seed", str(options.seed), "--out", str(folder), *options.inception_words]
    # Log rarely enough for speed, but often enough to stop in time.
    assignments = (
        *task.settings,
        *more,
        f"generated_images={FEW_GENERATED}",
        "few_images=allow",
        "log_every=100 steps",
    )
    words += sets(assignments)
    _, seconds = paceline(*words, *options.extra, until=options.until)
    return summarise(folder, seconds)


def train_trial(task: Task, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Train a short run without evaluations; return its summary."""
    never = tuple(f"{name}=1000 epochs" for name in ("evaluate_every", "sample_every", "save_every"))
    return train(task, folder, options.trial_steps * task.batch, options, *never)


def evaluate(folder: Path, generated: int, options: argparse.Namespace) -> dict[str, float]:
    """Return the metrics of the last checkpoint, measured in fp32."""
    words = ["evaluate", str(folder), "--checkpoint", "last", *options.inception_words]
    settings = (f"generated_images={generated}", "few_images=allow", *options.evaluation)
    printed, _ = paceline(*words, *sets(settings))
    return printed_metrics(printed)


def curve(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of the evaluations during training."""
    return [
        {name.partition("/")[2] or name: value for name, value in row.items() if name.startswith("train/")}
        | {"images": row["images"]}
        for row in read_metrics(folder)
        if any(name.startswith("train/FID") for name in row)
    ]


def write_one_class(source: Path, path: Path) -> None:
    """Write the first images of one class of an .npz file."""
    with np.load(source) as arrays:
        chosen = np.flatnonzero(arrays["y_train"] == SMALL_CLASS)[:NUM_SMALL]
        images = arrays["x_train"][chosen]
    labels = np.zeros(len(images), np.int64)
    np.savez(path, x_train=images, y_train=labels, x_test=images[:64], y_test=labels[:64])


def main() -> None:
    """Train and evaluate; write the results after each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--data-root", type=Path, required=True, help="folder of CIFAR-10, or an .npz file")
    parser.add_argument("--inception", default="", help="file with the 2015 Inception network")
    parser.add_argument("--minutes", type=float, default=18, help="training time, unless --images is given")
    parser.add_argument("--part-minutes", type=float, default=0, help="stop after this time; 0: do not stop")
    parser.add_argument("--images", type=int, default=0, help="number of images to train on")
    parser.add_argument("--trial-steps", type=int, default=1200, help="steps of the trial")
    parser.add_argument("--generated", type=int, default=50_000, help="number of generated images for the final FID")
    parser.add_argument("--evaluation", nargs="*", default=[], help="settings for the final evaluation")
    parser.add_argument("--seed", type=int, default=0, help="seed of the run")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs, plan.json and results.json")
    own, extra = split_arguments()
    options = parser.parse_args(own)
    options.extra, options.evaluation = extra, tuple(options.evaluation)
    options.until = monotonic() + 60 * options.part_minutes if options.part_minutes else 0.0
    task = TASKS[options.task]
    options.out.mkdir(parents=True, exist_ok=True)
    data = options.data_root
    if options.task == "small":
        data = options.out / "one_class.npz"
        if not data.is_file():
            write_one_class(options.data_root, data)
    options.inception_words = ["--inception", options.inception] if options.inception else []
    options.data_words = ["--data", "npz"] if data.suffix == ".npz" else []
    options.data_words += ["--data-root", str(data)]
    path = options.out / "results.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    results |= {"provenance": versions_and_hardware(), "task": task._asdict(), "extra": options.extra}

    def save(**more: Any) -> None:
        results.update(more)
        path.write_text(json.dumps(results, indent=1) + "\n")

    variants = {"plain": (), "adaptive": ADAPTIVE} if options.task == "small" else {"run": ()}
    try:
        trial = partial(train_trial, task, options=options)
        save(plan=make_plan(options.out, options.minutes, options.images, SHARE_FOR_TRAINING, trial))
        for name, more in variants.items():
            run = options.out / name
            # `small` is evaluated often, to show when the discriminator overfits.
            cadence = ("evaluate_every=10%", "sample_every=10%") if options.task == "small" else ()
            found: dict[str, Any] = {"training": train(task, run, results["plan"]["images"], options, *more, *cadence)}
            found["curve"] = curve(run)
            save(**{name: found})
            found["metrics"] = evaluate(run, options.generated, options)
            save(**{name: found})
            paceline("sample", str(run), "--checkpoint", "last", "--out", str(options.out / f"grid-{name}.png"))
    except Stopped:
        print("stopped; run the same command again to train the next part")
        return
    print(json.dumps({name: results[name] for name in ("plan", *variants)}))
    print(f"goal: {task.reach}" if task.reach else "")


if __name__ == "__main__":
    main()
