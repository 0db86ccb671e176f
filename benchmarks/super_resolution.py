"""Train SRResNet ×4 on a folder of photographs, then SRGAN from its weights, and evaluate both on Set5 and Set14.

    python benchmarks/super_resolution.py --data-root train291 --tests Set5 Set14 --vgg vgg.pth --minutes 15 --out out

A test set is a folder with the subfolders HR and LRx4 (low-resolution images). --images and --gan-images set how many
images SRResNet and SRGAN train on. Without --images, SRResNet trains on as many images as fit into --minutes at the
speed of a short trial. Both runs, strips for each test set and results.json are written to --out. PSNR and SSIM follow
protocol y: 8-bit, MATLAB's luma, ignoring a border of 4 pixels.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from time import perf_counter
from typing import Any

from _timed_training import printed_metrics, read_numbers, run_paceline, sets

from paceline.runs.provenance import versions_and_hardware

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
LARGEST_CROP = 128  # crop size of the preset train291
TRIAL_IMAGES = 20_000
SHARE_FOR_TRAINING = 0.9  # fraction of --minutes; the remaining time is for startup, evaluation and saving
CADENCE = [f"{name}=5%" for name in ("evaluate_every", "sample_every", "save_every")]
# The rescaled VGG19's activations are about 1. The pixel loss has a small weight, so that texture may
# differ from the original. The learning rate is low because the network is already trained.
GAN = [
    "stage=adversarial",
    "vgg_layer=relu5_4",
    "pixel=0.1",
    "perceptual=0.02",
    "adversarial=0.005",
    "warmup=0 images",
]


def train(folder: Path, images: int, arguments: argparse.Namespace, *more: str) -> dict[str, Any]:
    """Train a run; return the number of images, elapsed seconds and throughput."""
    words = ["train", "super_resolution", "--preset", "train291", "--data", "photos"]
    words += ["--data-root", str(arguments.out / "photos"), "--images", str(images), "--out", str(folder)]
    test = arguments.tests[0]  # with a separate test set, no photographs are held out for testing
    test_data = [f"test_root={test / 'HR'}", f"test_low_root={test / 'LRx4'}"]
    start = perf_counter()
    run_paceline(*words, *sets(CADENCE + test_data), *more, *arguments.extra)
    seconds = perf_counter() - start
    rows = read_numbers(folder)
    speeds = [row["time/images_per_second"] for row in rows if "time/images_per_second" in row]
    waits = [row["time/data_wait"] for row in rows if "time/data_wait" in row]
    middle = sorted(speeds)[len(speeds) // 2] if speeds else 0.0
    return {
        "images": max(row["images"] for row in rows),
        "process_seconds": seconds,
        "training_seconds": rows[-1]["seconds"],
        "images_per_second_median": middle,
        "share_waiting_for_data_mean": sum(waits) / max(1, len(waits)),
    }


def link_photographs(root: Path, folder: Path, crop: int) -> dict[str, int]:
    """Link the photographs that are at least as large as the crop; return how many are linked and how many are not."""
    from PIL import Image

    folder.mkdir(exist_ok=True)
    counts = {"used": 0, "too_small": 0}
    for path in sorted(path for path in root.iterdir() if path.suffix.lower() in SUFFIXES):
        with Image.open(path) as image:
            fits = min(image.size) >= crop
        counts["used" if fits else "too_small"] += 1
        link = folder / path.name
        if fits and not link.exists():
            link.symlink_to(path.resolve())
    return counts


def evaluate(folder: Path, test: Path, precision: str) -> dict[str, float]:
    """Return the metrics of a run's best checkpoint on a test set."""
    words = ["evaluate", str(folder), "--data", "photos", "--data-root", str(test / "HR")]
    printed = run_paceline(*words, "--set", f"low_root={test / 'LRx4'}", "--set", f"precision={precision}")
    return printed_metrics(printed)


def strips(runs: dict[str, Path], tests: list[Path], out: Path) -> list[str]:
    """Write strips for each test set's first images: low resolution, bicubic, each run's result and the original."""
    import numpy as np
    import torch
    from PIL import Image

    from paceline.evaluation.image_metrics import to_levels
    from paceline.images.grids import captioned, side_by_side
    from paceline.images.resample import bicubic
    from paceline.runs.finished_run import open_run

    recipes = {name: open_run(str(folder)).recipe.eval() for name, folder in runs.items()}
    files = []
    for test in tests:
        rows = []
        for path in sorted((test / "HR").iterdir())[:4]:
            high = Image.open(path).convert("RGB")
            low = Image.open(test / "LRx4" / path.name).convert("RGB")
            images = torch.from_numpy(np.array(low)).permute(2, 0, 1)[None].float() / 127.5 - 1
            shown = {"small": low.resize(high.size, Image.Resampling.NEAREST)}
            made = {"bicubic": bicubic(images, high.height, high.width)}
            with torch.no_grad():
                made |= {name: recipe.image_to_image(images)["image"] for name, recipe in recipes.items()}
            for name, one in made.items():
                shown[name] = Image.fromarray(to_levels(one)[0].permute(1, 2, 0).byte().numpy())
            shown["original"] = high
            box = centre(high.size, 192)
            rows.append(side_by_side([captioned(one.crop(box), name) for name, one in shown.items()]))
        file = out / f"strips-{test.name}.png"
        side_by_side(rows, vertical=True).save(file)
        files.append(file.name)
    return files


def centre(size: tuple[int, int], side: int) -> tuple[int, int, int, int]:
    """Return the box of a centre crop."""
    left, top = (max(0, (length - side) // 2) for length in size)
    return left, top, left + min(side, size[0]), top + min(side, size[1])


def main() -> None:
    """Train and evaluate; write the results after each stage, so that a time limit does not lose earlier results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True, help="folder of photographs to train on")
    parser.add_argument("--tests", type=Path, nargs="+", required=True, help="folders with HR and LRx4")
    parser.add_argument(
        "--minutes", type=float, default=15, help="training time of SRResNet in minutes, unless --images is given"
    )
    parser.add_argument("--images", type=int, default=0, help="number of images to train SRResNet on")
    parser.add_argument(
        "--gan-images", type=int, default=400_000, help="number of images to train SRGAN on; 0 skips it"
    )
    parser.add_argument("--vgg", type=Path, help="file with VGG19's weights; without it SRGAN has no perceptual loss")
    parser.add_argument("--eval-precision", default="fp32", help="evaluation precision")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs, the strips and results.json")
    parser.add_argument("extra", nargs="*", help="after --: additional flags for every training run")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"provenance": versions_and_hardware(), "extra": arguments.extra}

    def save(**more: Any) -> None:
        results.update(more)
        (arguments.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")

    save(photographs=link_photographs(arguments.data_root, arguments.out / "photos", LARGEST_CROP))
    images = arguments.images
    if not images:
        trial = train(arguments.out / "trial", TRIAL_IMAGES, arguments, "--set", "evaluate_every=100%")
        save(trial=trial)
        images = int(trial["images_per_second_median"] * arguments.minutes * 60 * SHARE_FOR_TRAINING)
    runs = {"SRResNet": arguments.out / "srresnet"}
    save(srresnet=train(runs["SRResNet"], images, arguments))
    save(srresnet=results["srresnet"] | evaluate_all(runs["SRResNet"], arguments))
    if arguments.gan_images:
        runs["SRGAN"] = arguments.out / "srgan"
        features = ["--vgg", str(arguments.vgg)] if arguments.vgg else ["--set", "perceptual=0"]
        words = ["--init-from", str(runs["SRResNet"]), "--lr", "1e-4", *sets(GAN), *features]
        save(srgan=train(runs["SRGAN"], arguments.gan_images, arguments, *words))
        save(srgan=results["srgan"] | evaluate_all(runs["SRGAN"], arguments))
    save(strips=strips(runs, arguments.tests, arguments.out))
    print(table(results, arguments.tests))


def evaluate_all(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a run's metrics on every test set."""
    return {"tests": {test.name: evaluate(folder, test, arguments.eval_precision) for test in arguments.tests}}


def table(results: dict[str, Any], tests: list[Path]) -> str:
    """Return PSNR and SSIM for bicubic upscaling and for both runs, as Markdown."""
    lines = ["", "| | " + " | ".join(f"{test.name} PSNR y | SSIM y" for test in tests) + " |"]
    lines.append("|---" * (1 + 2 * len(tests)) + "|")
    for name, run, prefix in (
        ("bicubic", "srresnet", "bicubic_"),
        ("SRResNet", "srresnet", ""),
        ("SRGAN", "srgan", ""),
    ):
        if run in results:
            numbers = [results[run]["tests"][test.name] for test in tests]
            figures = [f"{one[f'{prefix}psnr[y]']:.2f} | {one[f'{prefix}ssim[y]']:.4f}" for one in numbers]
            lines.append(f"| {name} | " + " | ".join(figures) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
