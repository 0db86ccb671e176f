"""Measure how fast the engine is by default: nine workloads against hand-written loops, Lightning and Accelerate.

Each row is one workload. Its variants take turns within one process, so that a slower machine affects all of them:

- `engine`: `paceline train` with its default flags (a long run, so that `--compile auto` compiles on a GPU), with
  `--compile off` and with `--compile on`, including data loading and metrics
- `captured loop`: the same networks and losses in a hand-written loop in one CUDA graph, also with compiled networks
- `Trainer`, `Accelerate`: the same networks and losses under other frameworks, eager and with compiled networks

The loops without the engine train on one batch that is already on the device. They load no data, update no EMA and,
except for the Trainer, log nothing.

Each row runs in its own process with a time limit. The variants are built in the order of their importance. Those that
are not yet begun after 60 % of the row's time are left out. The JSON file is written after every turn, so that a row
that is stopped keeps its turns.

    PYTHONPATH=src python benchmarks/fast_table.py --json fast_table.json              # one GPU, at most 25 minutes
    PYTHONPATH=src python benchmarks/fast_table.py --rows dcgan,srgan --variants engine --json fast_table.json
    PYTHONPATH=src python benchmarks/fast_table.py --tiny                              # on a CPU: every variant runs
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from _variants import (
    Fit,
    engine_fit,
    print_rows,
    summarise_rates,
    write_random_rows,
    write_results,
    write_small_images,
)

from paceline.core.registry import is_installed

TRIAL_STEPS = 4
VARIANTS = (
    "engine",
    "captured loop, compiled",
    "engine, compile off",
    "captured loop",
    "Trainer",
    "Accelerate",
    "Trainer, compiled",
    "Accelerate, compiled",
    "engine, compile on",
)
COMPILED = ("captured loop, compiled", "Trainer, compiled", "Accelerate, compiled", "engine, compile on")
BUILD_SHARE = 0.6  # of a row's time; the rest is for the turns
RATIOS = (
    ("engine, compile off", "captured loop"),
    ("engine, compile on", "captured loop, compiled"),
    ("engine", "captured loop, compiled"),
    ("engine", "Trainer"),
    ("engine", "Trainer, compiled"),
    ("engine", "Accelerate"),
    ("engine", "Accelerate, compiled"),
)
NEEDS = {"Trainer": "lightning", "Accelerate": "accelerate"}  # packages


@dataclass(frozen=True)
class Row:
    """A workload: a recipe with its settings, on random images."""

    recipe: str
    data: str  # "small": 32×32 pixels; "photos": crops of photographs; "rows": six panels side by side
    settings: dict[str, Any]
    tiny: dict[str, Any]  # settings for a CPU
    batch: int
    limit: int  # seconds, including the time to build and compile the networks
    package: str = ""  # that the network comes from


RESTORER = {"data": "photos", "lr": 2e-4, "weight_decay": 0, "content": "l1", "tv": 0}
GAN = {"size": 32, "channels": 3, "flip": "off", "smallest": 2}
ROWS = {
    "resnet18": Row(
        "classification",
        "small",
        {"stem": "small", "pad_crop": 4, "flip": "on", "optimizer": "sgd"},
        {"width": 4},
        batch=512,
        limit=120,
    ),
    "dual-gan": Row("dual_gan", "small", GAN, {"ngf": 4, "ndf": 4}, batch=128, limit=100),
    "dcgan": Row("dcgan", "small", GAN, {"ngf": 4, "ndf": 4}, batch=128, limit=90),
    "srgan": Row(
        "super_resolution",
        "photos",
        {"preset": "reference", "stage": "adversarial", "vgg": "random", "data": "photos", "crop": 128},
        {"num_blocks": 1, "width": 4, "d_width": 4, "crop": 32},
        batch=128,
        limit=200,
    ),
    "deepliif": Row(
        "translation",
        "rows",
        {"preset": "deepliif"},
        {
            **{"generator": "resnet_6", "segmentation_generator": "unet_32", "ngf": 2, "ndf": 2, "d_layers": 1},
            **{"size": 32, "crop": 0},
        },
        batch=1,
        limit=240,
    ),
    "r3gan": Row(
        "r3gan",
        "small",
        {"size": 32, "channels": 3, "conditional": "off", "few_images": "allow"},
        {"width": 16, "num_blocks": 1},
        batch=256,
        limit=200,
    ),
    # Crop and batch size are those of the published training settings of KAIR, NAFNet and BasicSR.
    "swinir": Row(
        "super_resolution",
        "photos",
        {
            **RESTORER,
            **{"network": "spandrel:SwinIR", "scale": 2, "crop": 128, "network_args.embed_dim": 60},
            **{"network_args.depths": [6] * 4, "network_args.num_heads": [6] * 4, "network_args.window_size": 8},
            **{"network_args.mlp_ratio": 2.0, "network_args.upsampler": "pixelshuffledirect"},
        },
        {"network_args.embed_dim": 12, "network_args.depths": [2], "network_args.num_heads": [2], "crop": 32},
        batch=64,
        limit=200,
        package="spandrel",
    ),
    "nafnet": Row(
        "restoration",
        "photos",
        {
            **RESTORER,
            **{"network": "spandrel:NAFNet", "degrade_noise": 25, "crop": 256, "optimizer": "adamw"},
            **{"network_args.width": 32, "network_args.enc_blk_nums": [2, 2, 4, 8]},
            **{"network_args.middle_blk_num": 12, "network_args.dec_blk_nums": [2] * 4},
        },
        {
            **{"network_args.width": 4, "network_args.enc_blk_nums": [1], "network_args.middle_blk_num": 1},
            **{"network_args.dec_blk_nums": [1], "crop": 32},
        },
        batch=4,
        limit=200,
        package="spandrel",
    ),
    "rrdbnet": Row(
        "esrgan",
        "photos",
        {**RESTORER, "width": 64, "num_blocks": 23, "scale": 4, "crop": 128},
        {"width": 8, "num_blocks": 1, "crop": 32},
        batch=16,
        limit=200,
    ),
}


def write_data(row: Row, folder: Path, tiny: bool) -> dict[str, Any]:
    """Write random images for a workload, and return the settings that select them."""
    if row.data == "small":
        write_small_images(folder, 600 if tiny else 50_000)
        return {"data": "npz", "data_root": folder / "random.npz"}
    if row.data == "photos":
        write_random_rows(folder / "photos", 96 if tiny else 512, panels=1, count=24)
        return {"data_root": folder / "photos"}
    write_random_rows(folder / "rows", 32 if tiny else 512)
    return {"data_root": folder / "rows"}


def make_fit(
    variant: str, row: Row, settings: dict[str, Any], folder: Path, device: torch.device, closing: ExitStack
) -> Fit:
    """Build one variant of a workload; `closing` closes its files."""
    from _frameworks import Losses, accelerate_fit, plain_fit, trainer_fit

    name, _, detail = variant.partition(", ")
    if name == "engine":
        choice = detail.removeprefix("compile ") or "auto"
        return engine_fit(variant, row.recipe, folder, device, closing, **settings, compile=choice)
    assignments = [f"{key}={value}" for key, value in settings.items()]
    losses = Losses(row.recipe, assignments, compiled=detail == "compiled")
    if name == "Trainer":
        return trainer_fit(losses, folder / "logs")
    return accelerate_fit(losses) if name == "Accelerate" else plain_fit(losses, captured=True)


def build(
    row: Row, options: argparse.Namespace, folder: Path, device: torch.device, began: float, closing: ExitStack
) -> dict[str, Fit]:
    """Return the chosen variants that can be built in time; report the others. `closing` closes their files."""
    settings = write_data(row, folder, options.tiny) | row.settings | (row.tiny if options.tiny else {})
    settings |= {
        "batch_size": options.batch or (4 if options.tiny and row.batch > 1 else row.batch),
        "loader": "resident",
    }
    limit = options.limit or row.limit
    fits: dict[str, Fit] = {}
    for name in (one for one in VARIANTS if any(one.startswith(part) for part in options.variants.split(","))):
        start = perf_counter()
        packages = (row.package, NEEDS.get(name.partition(",")[0], ""))
        if missing := [package for package in packages if not is_installed(package)]:
            print(f"    {name}: not measured ({', '.join(missing)} not installed)", flush=True)
            continue
        if start - began > BUILD_SHARE * limit:
            print(f"    {name}: not measured (more than {BUILD_SHARE:.0%} of the {limit} s is spent)", flush=True)
            continue
        if name in COMPILED and device.type == "cpu" and not options.compile_on_cpu:
            continue
        try:
            fit = make_fit(name, row, settings, folder, device, closing)
            fit(TRIAL_STEPS)
        except Exception as error:  # a compiler may raise any exception; the other variants are still measured
            reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
            print(f"    {name}: not measured ({type(error).__name__}: {reason[:200]})", flush=True)
            continue
        fits[name] = fit
        print(f"    {name}: ready after {perf_counter() - start:.1f} s", flush=True)
    return fits


def measure(
    name: str,
    options: argparse.Namespace,
    device: torch.device,
    on_turn: Callable[[list[dict[str, Any]], list[dict[str, Any]]], None],
) -> None:
    """Measure the variants of one row in turns."""
    row, began = ROWS[name], perf_counter()
    batch = options.batch or (4 if options.tiny and row.batch > 1 else row.batch)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as closing:
        fits = build(row, options, Path(folder), device, began, closing)
        lengths = {one: max(2, round(options.seconds / (fit(TRIAL_STEPS) / TRIAL_STEPS))) for one, fit in fits.items()}
        rates: dict[str, list[float]] = {one: [] for one in fits}
        rows: list[dict[str, Any]] = []
        for turn in range(options.repeats if fits else 0):
            for one in list(fits) if turn % 2 == 0 else reversed(fits):
                rates[one].append(lengths[one] * batch / fits[one](lengths[one]))
            rows = summarise_rates(rates, list(lengths.values()))
            on_turn(rows, ratios_of(rates))
    if rows:
        print_rows(f"{name}, batch {batch}, {device.type}, {perf_counter() - began:.0f} s", rows)
    for ratio in ratios_of(rates):
        low, middle, high = ratio["quartiles"]
        print(f"  {ratio['of']} ÷ {ratio['over']}: {middle:.3f} ({low:.3f} – {high:.3f})", flush=True)


def ratios_of(rates: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return the ratios of speeds, each computed from the blocks of the same turn."""
    return [
        {
            "of": one,
            "over": other,
            "quartiles": np.percentile(np.divide(rates[one], rates[other]), [25, 50, 75]).tolist(),
        }
        for one, other in RATIOS
        if rates.get(one) and rates.get(other)
    ]


def run_row(name: str, options: argparse.Namespace) -> None:
    """Measure one row in this process, and write its results to the row's own file after every turn."""
    warnings.filterwarnings("ignore")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)

    def on_turn(rows: list[dict[str, Any]], ratios: list[dict[str, Any]]) -> None:
        write_results(options.row_json, options, row=name, variants=rows, ratios=ratios)

    measure(name, options, device, on_turn)


def main() -> None:
    """Measure each row in a process of its own, and collect the results in one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="comma-separated workloads")
    parser.add_argument("--variants", default=",".join(("engine", "captured loop", *NEEDS)), help="beginnings of names")
    parser.add_argument("--seconds", type=float, default=0.6, help="approximate length of a block")
    parser.add_argument("--repeats", type=int, default=5, help="number of blocks per variant")
    parser.add_argument(
        "--batch", type=int, default=0, help="images per step (default: the batch size of the workload)"
    )
    parser.add_argument("--limit", type=int, default=0, help="seconds per row (default: 90 to 240)")
    parser.add_argument("--tiny", action="store_true", help="use tiny networks, to test the script without a GPU")
    parser.add_argument("--compile-on-cpu", action="store_true", help="also measure compiled variants without a GPU")
    parser.add_argument("--json", default="", help="JSON file for the results, with versions and hardware")
    parser.add_argument("--row-json", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.rows.split(",")
    for name in names:
        if name not in ROWS:
            parser.error(f"--rows {name}: expected some of {', '.join(ROWS)}")
    if options.row_json:
        run_row(names[0], options)
        return
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            file = Path(folder) / f"{name}.json"
            command = [sys.executable, __file__, *sys.argv[1:], "--rows", name, "--row-json", str(file)]
            limit = options.limit or ROWS[name].limit
            state = "complete"
            try:
                code = subprocess.run(command, timeout=limit).returncode
                state = state if code == 0 else f"failed with exit code {code}"
            except subprocess.TimeoutExpired:
                state = f"stopped after {limit} s"
            if state != "complete":
                print(f"{name}: {state}", flush=True)
            results.append({"row": name, "state": state, **(json.loads(file.read_text()) if file.exists() else {})})
            write_results(options.json, options, rows=results)


if __name__ == "__main__":
    main()
