"""Compare the training speed of a DCGAN under Lightning's Trainer and under the engine, each used as documented.

The Trainer runs a LightningModule with manual optimization (a GAN has two optimizers), with its own precision
(`bf16-mixed` on a GPU), loop and `self.log`. The Trainer is measured with torch's DataLoader, with a batch
that is already on the device, and with compiled networks. The engine runs as in `paceline train dcgan`. Both use the
same networks, batch size and images.

The Trainer cannot be paused between steps, so a block is a whole `fit`, timed from the end of its first steps to the
end of its last one. The engine's blocks are interleaved with the fits.

    PYTHONPATH=src python benchmarks/lightning_trainer.py --json lightning_trainer.json
    PYTHONPATH=src python benchmarks/lightning_trainer.py --samples 512 --batch 8 --width 4 --seconds 0.3 --repeats 3
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import repeat
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning
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
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from paceline.models.dcgan import Discriminator, Generator

SIDE_PX, NOISE = 32, 100
WARMUP_BATCHES = 20  # number of batches before timing starts in each fit


class Images(Dataset[Tensor]):
    """A dataset of small images in one tensor; pixels are scaled to [-1, 1] when read."""

    def __init__(self, images: np.ndarray) -> None:
        self.images = torch.from_numpy(images).permute(0, 3, 1, 2)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        return self.images[index].float() / 127.5 - 1


class Repeated:
    """A loader without overhead: it repeats one batch."""

    def __init__(self, batch: Tensor) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Tensor]:
        return repeat(self.batch, len(self))

    def __len__(self) -> int:
        return 10**6


class Gan(lightning.LightningModule):
    """A DCGAN as a LightningModule with manual optimization."""

    def __init__(self, width: int, compiled: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = Generator(SIDE_PX, 3, NOISE, width, 2)
        self.discriminator = Discriminator(SIDE_PX, 3, width, 2)
        if compiled:
            self.generator.compile()
            self.discriminator.compile()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        networks = (self.generator, self.discriminator)
        return [torch.optim.Adam(network.parameters(), lr=2e-4, betas=(0.5, 0.999)) for network in networks]

    def training_step(self, real: Tensor, number: int) -> None:
        optimizers: Any = self.optimizers()
        generator_optimizer, discriminator_optimizer = optimizers
        fake = self.generator(torch.randn(len(real), NOISE, device=self.device))
        self.toggle_optimizer(generator_optimizer)
        logits = self.discriminator(fake)
        loss = F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))
        self.log("generator", loss, prog_bar=True)
        self.manual_backward(loss)
        generator_optimizer.step()
        generator_optimizer.zero_grad()
        self.untoggle_optimizer(generator_optimizer)
        self.toggle_optimizer(discriminator_optimizer)
        on_real, on_fake = self.discriminator(real), self.discriminator(fake.detach())
        loss = F.binary_cross_entropy_with_logits(on_real, torch.ones_like(on_real))
        loss = loss + F.binary_cross_entropy_with_logits(on_fake, torch.zeros_like(on_fake))
        self.log("discriminator", loss, prog_bar=True)
        self.manual_backward(loss)
        discriminator_optimizer.step()
        discriminator_optimizer.zero_grad()
        self.untoggle_optimizer(discriminator_optimizer)


class Clock(lightning.Callback):
    """Measures the time from the end of the warm-up to the end of the last step."""

    def __init__(self, device: torch.device, last: int) -> None:
        self.device, self.last, self.seconds = device, last, 0.0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
        done = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        if done == WARMUP_BATCHES or done == self.last:
            synchronize(self.device)
            self.seconds = perf_counter() - self.seconds


def make_fit(data: Iterable[Any], width: int, device: torch.device, folder: Path, compiled: bool = False) -> Fit:
    """Return a function that fits for a number of steps and returns the elapsed seconds."""

    def fit(steps: int) -> float:
        set_torch_defaults()
        clock = Clock(device, WARMUP_BATCHES + steps)
        trainer = lightning.Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=1,
            precision="bf16-mixed" if device.type == "cuda" else "32-true",
            max_steps=2 * clock.last,  # Lightning counts the steps of the two optimizers separately
            callbacks=[clock],
            logger=lightning.pytorch.loggers.CSVLogger(str(folder)),
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )
        trainer.fit(Gan(width, compiled), data)
        return clock.seconds

    return fit


def make_variants(
    options: argparse.Namespace, folder: Path, device: torch.device, images: np.ndarray, closing: ExitStack
) -> dict[str, Fit]:
    """Return all variants; `closing` closes their files."""
    np.savez(
        folder / "random.npz",
        x_train=images,
        y_train=np.zeros(len(images), int),
        x_test=images[:1],
        y_test=np.zeros(1, int),
    )
    fits: dict[str, Fit] = {}
    for workers in map(int, options.workers.split(",")):
        loader = DataLoader(
            Images(images),
            options.batch,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=device.type == "cuda",
        )
        fits[f"Trainer, {workers} workers"] = make_fit(loader, options.width, device, folder)
    batch = torch.stack([Images(images)[index] for index in range(options.batch)]).to(device)
    fits["Trainer, no loading"] = make_fit(Repeated(batch), options.width, device, folder)
    if options.compile:
        fits["Trainer, no loading, compiled"] = make_fit(Repeated(batch), options.width, device, folder, compiled=True)
    settings: dict[str, Any] = {"data": "npz", "data_root": folder / "random.npz", "batch_size": options.batch}
    settings |= {"size": SIDE_PX, "channels": 3, "flip": "off", "smallest": 2}
    settings |= {"ngf": options.width, "ndf": options.width, "loader": "resident"}
    fits["engine"] = engine_fit("engine", "dcgan", folder, device, closing, compile="off", **settings)
    return fits


def main() -> None:
    """Measure all variants in turn, print a table and write the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128, help="images per step")
    parser.add_argument("--width", type=int, default=64, help="channels of the networks")
    parser.add_argument("--samples", type=int, default=50_000, help="number of images")
    parser.add_argument(
        "--workers", default=f"2,{os.cpu_count()}", help="comma-separated worker counts of the Trainer's DataLoader"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="approximate length of a block")
    parser.add_argument("--repeats", type=int, default=5, help="number of blocks per variant")
    parser.add_argument("--compile", action="store_true", help="also measure the Trainer with compiled networks")
    parser.add_argument("--json", default="", help="JSON file for the results, with versions and hardware")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    images = np.random.default_rng(0).integers(256, size=(options.samples, SIDE_PX, SIDE_PX, 3), dtype=np.uint8)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as closing:
        fits = make_variants(options, Path(folder), device, images, closing)
        lengths = {name: max(2, round(options.seconds / (fit(10) / 10))) for name, fit in fits.items()}
        rates: dict[str, list[float]] = {name: [] for name in fits}
        for turn in range(options.repeats):
            for name in list(fits) if turn % 2 == 0 else reversed(fits):
                rates[name].append(lengths[name] * options.batch / fits[name](lengths[name]))
            rows = summarise_rates(rates, list(lengths.values()))
            write_results(options.json, options, rows=rows)
    print_rows(
        f"DCGAN, {SIDE_PX} pixels, batch {options.batch}, lightning {lightning.__version__}, {device.type}", rows
    )


if __name__ == "__main__":
    main()
