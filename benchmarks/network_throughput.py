"""Compare the training speed of SwinIR-light, NAFNet and RRDBNet: plain loops, Lightning's Trainer and the engine.

Each network is trained at the crop and batch size of its published training settings. All variants train the same
network with Adam or AdamW in bf16. The plain loops and the Trainer repeat one batch that is already on the device. The
engine also loads its data: it crops photographs in GPU memory and, for super-resolution, downsamples the crops. Blocks
of the variants take turns within one process. The JSON file is written after every turn.

    PYTHONPATH=src python benchmarks/network_throughput.py --json network_throughput.json
    PYTHONPATH=src python benchmarks/network_throughput.py --tiny    # on a CPU: shows that every variant runs
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from _variants import (
    Fit,
    engine_fit,
    print_rows,
    set_torch_defaults,
    summarise_rates,
    synchronize,
    write_results,
)
from PIL import Image
from torch import Tensor, nn

from paceline.core.registry import is_installed
from paceline.models.esrgan import RRDBNet
from paceline.models.networks import NetworkChoice, NetworkTask, make_network

WARMUP_STEPS = 12  # steps before timing starts in each block of a plain loop or a fit
TRIAL_STEPS = 4
VARIANTS = ("plain", "plain compiled", "trainer", "trainer compiled", "engine", "engine compiled")


@dataclass(frozen=True)
class Workload:
    """A network with the settings that it was published with."""

    recipe: str
    network: str  # "spandrel:NAME", or "" for the recipe's own RRDBNet
    arguments: Mapping[str, Any]
    scale: int
    crop_px: int
    batch: int
    source: str  # origin of the crop and batch size
    optimizer: str = "adam"

    def make(self) -> nn.Module:
        """Return the network with random weights."""
        low_px = self.crop_px // self.scale
        if not self.network:
            return RRDBNet(self.scale, 3, self.arguments["width"], self.arguments["num_blocks"], 32)
        task = NetworkTask(3, low_px, low_px, out_channels=3, scale=self.scale)
        return make_network(NetworkChoice(self.network, self.arguments), task)

    def settings(self) -> dict[str, Any]:
        """Return the engine's settings for this workload."""
        own = {f"network_args.{name}": value for name, value in self.arguments.items()} if self.network else {}
        own |= {"network": self.network} if self.network else dict(self.arguments)
        own |= {"scale": self.scale} if self.scale > 1 else {"degrade_noise": 25}
        learner = {"optimizer": self.optimizer, "lr": 2e-4, "weight_decay": 0, "content": "l1", "tv": 0}
        return {**own, **learner, "crop": self.crop_px, "batch_size": self.batch, "loader": "resident"}


WORKLOADS = {
    "SwinIR-light ×2": Workload(
        "super_resolution",
        "spandrel:SwinIR",
        {
            "embed_dim": 60,
            "depths": [6, 6, 6, 6],
            "num_heads": [6, 6, 6, 6],
            "window_size": 8,
            "mlp_ratio": 2.0,
            "upsampler": "pixelshuffledirect",
        },
        scale=2,
        crop_px=128,
        batch=64,
        source="cszn/KAIR, options/swinir/train_swinir_sr_lightweight.json: 64 images on 8 GPUs, here on one",
    ),
    "NAFNet, width 32": Workload(
        "restoration",
        "spandrel:NAFNet",
        {"width": 32, "enc_blk_nums": [2, 2, 4, 8], "middle_blk_num": 12, "dec_blk_nums": [2, 2, 2, 2]},
        scale=1,
        crop_px=256,
        batch=4,
        source="megvii-research/NAFNet, options/train/SIDD/NAFNet-width32.yml: 4 images per GPU",
        optimizer="adamw",
    ),
    "RRDBNet ×4": Workload(
        "esrgan",
        "",
        {"width": 64, "num_blocks": 23},
        scale=4,
        crop_px=128,
        batch=16,
        source="XPixelGroup/BasicSR, options/train/ESRGAN/train_RRDBNet_PSNR_x4.yml: 16 images on one GPU",
    ),
}
TINY: dict[str, dict[str, Any]] = {
    "SwinIR-light ×2": {"embed_dim": 12, "depths": [2], "num_heads": [2]},
    "NAFNet, width 32": {"width": 4, "enc_blk_nums": [1], "middle_blk_num": 1, "dec_blk_nums": [1]},
    "RRDBNet ×4": {"width": 8, "num_blocks": 1},
}


def tiny(name: str, workload: Workload) -> Workload:
    """Return a small version of a workload."""
    return replace(workload, arguments={**workload.arguments, **TINY[name]}, crop_px=32, batch=2)


class Side:
    """A network, its optimizer and one batch on the device."""

    def __init__(self, workload: Workload, device: torch.device, *, compiled: bool, channels_last: bool) -> None:
        torch.manual_seed(0)
        self.network = workload.make().to(device).train()
        format_ = torch.channels_last if channels_last else torch.contiguous_format
        self.network.to(memory_format=format_)
        if compiled:
            self.network.compile()
        self.decouples_decay = workload.optimizer == "adamw"
        low_px = workload.crop_px // workload.scale
        self.low, self.high = (
            (torch.rand(workload.batch, 3, side, side, device=device) * 2 - 1).to(memory_format=format_)
            for side in (low_px, workload.crop_px)
        )

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Return a new optimizer for the network."""
        kind = torch.optim.AdamW if self.decouples_decay else torch.optim.Adam
        parameters = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        return kind(parameters, lr=2e-4, weight_decay=0)


def plain_fit(side: Side, device: torch.device) -> Fit:
    """Return a loop as in plain training scripts: bf16 autocast, an L1 loss, torch's default optimizer."""
    optimizer = side.make_optimizer()

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = F.l1_loss(side.network(side.low), side.high)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def fit(steps: int) -> float:
        set_torch_defaults()
        torch.backends.cudnn.benchmark = True  # as in the published training scripts
        for _ in range(WARMUP_STEPS):
            step()
        synchronize(device)
        start = perf_counter()
        for _ in range(steps):
            step()
        synchronize(device)
        return perf_counter() - start

    return fit


def trainer_fit(side: Side, device: torch.device, folder: Path) -> Fit:
    """Return a function that trains under Lightning's Trainer."""
    import lightning
    from lightning_trainer import WARMUP_BATCHES, Clock, Repeated

    class Restorer(lightning.LightningModule):
        """The network as a LightningModule with automatic optimization."""

        def __init__(self) -> None:
            super().__init__()
            self.network = side.network

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return side.make_optimizer()

        def training_step(self, batch: Tensor, number: int) -> Tensor:
            loss = F.l1_loss(self.network(side.low), side.high)
            self.log("loss", loss)
            return loss

    def fit(steps: int) -> float:
        set_torch_defaults()
        clock = Clock(device, WARMUP_BATCHES + steps)
        trainer = lightning.Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=1,
            precision="bf16-mixed" if device.type == "cuda" else "32-true",
            benchmark=True,
            max_steps=clock.last,
            callbacks=[clock],
            logger=lightning.pytorch.loggers.CSVLogger(str(folder)),
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )
        trainer.fit(Restorer(), Repeated(torch.zeros(1, device=device)))
        return clock.seconds

    return fit


def make_fits(
    workload: Workload, options: argparse.Namespace, folder: Path, device: torch.device, closing: ExitStack
) -> dict[str, Fit]:
    """Return the chosen variants; a variant that cannot be built or run is reported and left out.

    `closing` closes their files.
    """
    fits: dict[str, Fit] = {}
    for name in options.variants.split(","):
        compiled = name.endswith("compiled")
        start = perf_counter()
        try:
            if name.startswith("engine"):
                settings = workload.settings() | {
                    "data_root": folder / "photos",
                    "compile": "on" if compiled else "off",
                }
                fit = engine_fit(name, workload.recipe, folder, device, closing, **settings)
            else:
                side = Side(workload, device, compiled=compiled, channels_last=options.channels_last)
                fit = trainer_fit(side, device, folder) if name.startswith("trainer") else plain_fit(side, device)
            fit(TRIAL_STEPS)
        except Exception as error:  # a compiler may raise any exception; the other variants are still measured
            reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
            print(f"    {name}: not measured ({type(error).__name__}: {reason[:200]})", flush=True)
            continue
        fits[name] = fit
        print(f"    {name}: ready after {perf_counter() - start:.1f} s", flush=True)
    return fits


def measure(
    workload: Workload, options: argparse.Namespace, device: torch.device, on_turn: Callable[[Any], None]
) -> list[dict[str, Any]]:
    """Return one row per variant, measured in turns."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as closing:
        write_photographs(Path(folder) / "photos", max(2 * workload.crop_px, 96))
        fits = make_fits(workload, options, Path(folder), device, closing)
        lengths = {
            name: max(2, round(options.seconds / (fit(TRIAL_STEPS) / TRIAL_STEPS))) for name, fit in fits.items()
        }
        rates: dict[str, list[float]] = {name: [] for name in fits}
        rows: list[dict[str, Any]] = []
        for turn in range(options.repeats):
            for name in list(fits) if turn % 2 == 0 else reversed(fits):
                rates[name].append(lengths[name] * workload.batch / fits[name](lengths[name]))
            rows = summarise_rates(rates, list(lengths.values()))
            on_turn(rows)
    return rows


def write_photographs(folder: Path, side_px: int) -> None:
    """Write random images, which are as large in GPU memory as photographs."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    for number in range(24):
        pixels = generator.integers(256, size=(side_px, side_px, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png", compress_level=0)


def main() -> None:
    """Measure all networks, print a table for each and write the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join(name.split()[0].strip(",") for name in WORKLOADS))
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated variants")
    parser.add_argument("--channels-last", action="store_true", help="plain loops and the Trainer use channels_last")
    parser.add_argument("--tiny", action="store_true", help="small networks and crops, to test the script on a CPU")
    parser.add_argument("--seconds", type=float, default=0.0, help="length of a block (default: 2, with --tiny 0.2)")
    parser.add_argument("--repeats", type=int, default=5, help="number of blocks per variant")
    parser.add_argument("--json", default="", help="JSON file for the results, with versions and hardware")
    options = parser.parse_args()
    options.seconds = options.seconds or (0.2 if options.tiny else 2.0)
    if options.tiny:
        options.variants = ",".join(name for name in options.variants.split(",") if not name.endswith("compiled"))
    if not is_installed("lightning"):
        options.variants = ",".join(name for name in options.variants.split(",") if not name.startswith("trainer"))
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    results: dict[str, Any] = {}
    for name, workload in WORKLOADS.items():
        if not any(name.startswith(wanted) for wanted in options.networks.split(",")):
            continue
        chosen = tiny(name, workload) if options.tiny else workload
        if chosen.network and not is_installed("spandrel"):
            print(f"{name}: not measured, because spandrel is not installed: pip install 'paceline[spandrel]'")
            continue
        title = f"{name}, crop {chosen.crop_px}, batch {chosen.batch}, {device.type} ({workload.source})"
        print(title, flush=True)

        def on_turn(rows: Any, name: str = name, title: str = title) -> None:
            results[name] = {"title": title, "rows": rows}
            write_results(options.json, options, networks=results)

        print_rows(name, measure(chosen, options, device, on_turn))


if __name__ == "__main__":
    main()
