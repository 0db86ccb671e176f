"""Train a network for a number of minutes on one GPU and evaluate it on its test sets.

    python benchmarks/network_training.py rcan291 --data-root train291 --tests Set5 Set14 --minutes 18 --out out/rcan
    python benchmarks/network_training.py nafnet --data-root train291 --tests Set14/HR --minutes 15 --out out/nafnet
    python benchmarks/network_training.py cifar100 --data-root cifar100.npz --minutes 10 --out out/cifar100

A short trial measures the training speed, and OUT/plan.json stores the number of images that fit into --minutes. Run
the same command again to resume after an interruption, or after --part-minutes: the trial is not repeated, and the run
continues exactly. The results, versions and hardware are written to OUT/results.json. Arguments after `--` are passed
to every training run.

For rcan291, the photographs are also used at 0.9, 0.8, 0.7 and 0.6 times their size. A test set is a folder with the
subfolders HR and LRx4. PSNR and SSIM follow protocol y. The results of a self-ensemble (the mean over eight flips and
rotations) are listed separately. For nafnet, a test set is a folder of
photographs, to which Gaussian noise with a standard deviation of 25 grey levels is added; protocol rgb.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from _timed_training import (
    Deadline,
    Stopped,
    make_plan,
    printed_metrics,
    run_paceline,
    sets,
    split_arguments,
    summarise,
)
from PIL import Image
from super_resolution import evaluate, link_photographs
from torch import Tensor

from paceline.evaluation.image_metrics import luma, psnr, to_levels
from paceline.runs.finished_run import open_run
from paceline.runs.metrics import read_metrics
from paceline.runs.provenance import versions_and_hardware

SHARE_FOR_TRAINING = 0.93  # fraction of --minutes; the remaining time is for evaluation and saving
BORDER_PX = 4  # pixels at each edge that protocol y ignores at scale 4
CADENCE = ["evaluate_every=10%", "sample_every=50%", "save_every=5%"]
TRIAL_CADENCE = ["evaluate_every=100%", "sample_every=100%", "save_every=100%"]  # only training is timed
SCALED = "@"  # between the name of a photograph and the scale of a smaller copy


class Task(NamedTuple):
    """A preset and what it is trained on."""

    recipe: str
    preset: str
    data: str
    trial_images: int  # enough for several log intervals after the step has been captured
    crop_px: int = 0  # smaller photographs are left out; 0 if the data has no photographs
    scales: tuple[float, ...] = ()  # also train on photographs scaled by these factors
    reach: str = ""  # goal, printed with the results


TASKS = {
    "rcan291": Task(
        *("super_resolution", "rcan291", "photos", 24_000, 160, (0.9, 0.8, 0.7, 0.6)),
        reach="Set5 31.75 dB, Set14 28.28 dB (MemNet: 31.74, 28.26)",
    ),
    "nafnet": Task("restoration", "nafnet", "degraded", 24_000, 128, reach="Set14 30.5 dB (U-Net: 30.27)"),
    "cifar100": Task("classification", "cifar100", "npz", 500_000, reach="81 % top-1"),
}


def train(
    task: Task, folder: Path, images: int, options: argparse.Namespace, cadence: list[str] = CADENCE
) -> dict[str, float]:
    """Train a run, or resume it; return the number of images, the training time and the median speed."""
    words = ["train", task.recipe, "--preset", task.preset, "--data", task.data, "--data-root", str(options.data)]
    words += ["--images", str(images), "--seed", str(options.seed), "--out", str(folder)]
    start = perf_counter()
    words += [*sets(cadence + data_settings(task, options)), *options.extra]
    run_paceline(*words, deadline=options.deadline)
    return summarise(folder, perf_counter() - start)


def data_settings(task: Task, options: argparse.Namespace) -> list[str]:
    """Return the settings for the splits; with a separate test set, no photographs are held out for testing."""
    grouped = [f"group_by=^([^{SCALED}.]+)"] if task.scales else []  # copies of one photograph are in the same split
    if not task.crop_px or not options.tests:
        return grouped
    test = options.tests[0]
    if task.data == "degraded":
        return [*grouped, f"test_root={test}", "validation=0.02"]
    return [*grouped, f"test_root={test / 'HR'}", f"test_low_root={test / 'LRx4'}"]


def add_scaled(folder: Path, task: Task) -> int:
    """Write copies of the photographs in the folder at other scales, unless too small; return how many there are."""
    copies = 0
    for path in sorted(path for path in folder.iterdir() if SCALED not in path.name):
        with Image.open(path) as image:
            for scale in task.scales:
                size = round(image.width * scale), round(image.height * scale)
                if min(size) < task.crop_px:
                    continue
                copies += 1
                copy = folder / f"{path.stem}{SCALED}{scale}.png"
                if not copy.exists():
                    image.convert("RGB").resize(size, Image.Resampling.BICUBIC).save(copy, compress_level=1)
    return copies


def evaluate_photographs(folder: Path, test: Path) -> dict[str, float]:
    """Return the metrics of a denoiser on a folder of photographs."""
    words = ["--data", "degraded", "--data-root", str(test), "--set", "degrade_noise=25", "--set", "precision=fp32"]
    printed = run_paceline("evaluate", str(folder), *words)
    return printed_metrics(printed)


def self_ensemble(upscale: Callable[[Tensor], Tensor], image: Tensor) -> Tensor:
    """Return the mean of the results for all eight flips and rotations of an image, each transformed back."""
    made = []
    for flipped in (False, True):
        for quarter_turns in range(4):
            turned = torch.rot90(image.flip(-1) if flipped else image, quarter_turns, (-2, -1))
            back = torch.rot90(upscale(turned), -quarter_turns, (-2, -1))
            made.append(back.flip(-1) if flipped else back)
    return torch.stack(made).mean(0)


@torch.no_grad()
def ensemble_psnr(folder: Path, test: Path) -> dict[str, float]:
    """Return the mean PSNR (protocol y) over a test set, without and with self-ensemble, in float32."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recipe = open_run(str(folder)).recipe.eval().to(device)
    torch.backends.cudnn.allow_tf32 = False

    def upscale(images: Tensor) -> Tensor:
        return recipe.image_to_image(images)["image"]

    found: dict[str, list[float]] = {"psnr[y]": [], "psnr[y], self-ensemble": []}
    for path in sorted((test / "HR").iterdir()):
        low, high = (_read(file, device) for file in (test / "LRx4" / path.name, path))
        high = high[..., : low.shape[-2] * 4, : low.shape[-1] * 4]
        for name, made in zip(found, (upscale(low), self_ensemble(upscale, low)), strict=True):
            inside = [luma(to_levels(one))[..., BORDER_PX:-BORDER_PX, BORDER_PX:-BORDER_PX] for one in (made, high)]
            found[name].append(float(psnr(inside[0], inside[1])))
    return {name: mean(values) for name, values in found.items()}


def _read(path: Path, device: torch.device) -> Tensor:
    with Image.open(path) as image:
        pixels = torch.from_numpy(np.array(image.convert("RGB")))
    return pixels.permute(2, 0, 1)[None].float().to(device) / 127.5 - 1


def main() -> None:
    """Train and evaluate; write the results after each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--data-root", type=Path, required=True, help="folder of photographs, or an .npz file")
    parser.add_argument("--tests", type=Path, nargs="*", default=[], help="test sets")
    parser.add_argument("--minutes", type=float, default=15, help="training time, unless --images is given")
    parser.add_argument("--part-minutes", type=float, default=0, help="stop training after this time; 0: do not stop")
    parser.add_argument("--images", type=int, default=0, help="number of images to train on")
    parser.add_argument("--trial-images", type=int, default=0, help="number of images of the trial")
    parser.add_argument("--seed", type=int, default=0, help="seed of the run")
    parser.add_argument("--out", type=Path, required=True, help="folder for the run, plan.json and results.json")
    own, extra = split_arguments()
    options = parser.parse_args(own)
    options.extra, options.deadline = extra, Deadline(options.part_minutes)
    task, options.data = TASKS[options.task], options.data_root
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"provenance": versions_and_hardware(), "task": task._asdict(), "extra": options.extra}

    def save(**more: Any) -> None:
        results.update(more)
        (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")

    if task.crop_px:
        options.data = options.out / "photos"
        counts = link_photographs(options.data_root, options.data, task.crop_px)
        save(photographs={**counts, "scaled_copies": add_scaled(options.data, task)})
    images = options.trial_images or task.trial_images
    trial = partial(train, task, images=images, options=options, cadence=TRIAL_CADENCE)
    save(plan=make_plan(options.out, options.minutes, options.images, SHARE_FOR_TRAINING, trial))
    run = options.out / "run"
    save(training=train(task, run, results["plan"]["images"], options))
    tested = [row for row in read_metrics(run) if any(name.startswith("test/") for name in row)]
    save(test=tested[-1] if tested else {})
    for test in options.tests:
        if options.task == "rcan291":
            found: dict[str, Any] = {**evaluate(run, test, "fp32"), "ensemble": ensemble_psnr(run, test)}
        else:
            found = evaluate_photographs(run, test)
        save(tests={**results.get("tests", {}), str(test): found})
    json.dump({name: results[name] for name in ("plan", "training", "test", "tests") if name in results}, sys.stdout)
    print(f"\ngoal: {task.reach}")


if __name__ == "__main__":
    try:
        main()
    except Stopped:
        print("stopped; run the same command again to resume")
