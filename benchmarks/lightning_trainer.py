"""How fast Lightning's own Trainer trains a DCGAN, beside the engine: both as their documentation has them.

The Trainer's side is a LightningModule with manual optimisation (a GAN has two optimizers), the Trainer's own
precision (`bf16-mixed` on a GPU), its own loop and `self.log`, on torch's DataLoader; once more with batches that lie
on the device already, and once compiled. The engine's side is what `paceline train dcgan` runs. Networks, batch and
pictures are the same.

The Trainer cannot be stopped and gone on with step by step, so a block is a whole `fit` of as many batches, timed
inside it from the end of its first steps to the end of its last; the engine's blocks come between.

    PYTHONPATH=src python benchmarks/lightning_trainer.py --json lightning_trainer.json
    PYTHONPATH=src python benchmarks/lightning_trainer.py --samples 512 --batch 8 --width 4 --seconds 0.3 --repeats 3
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning
import numpy as np
import torch
import torch.nn.functional as F
from _sides import block, engine_side, keep_json, print_rows, rates_as_rows, torch_defaults, wait_for
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from paceline.models.dcgan import Discriminator, Generator

SIDE_PX, NOISE = 32, 100
WARMUP_BATCHES = 20  # of each fit
Fit = Callable[[int], float]  # the seconds of so many steps


class Pictures(Dataset):
    """Small pictures as a tensor, scaled when read."""

    def __init__(self, pictures: np.ndarray) -> None:
        self.pictures = torch.from_numpy(pictures).permute(0, 3, 1, 2)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Tensor:
        return self.pictures[index].float() / 127.5 - 1


class Repeated:
    """One batch again and again, as a loader that costs nothing."""

    def __init__(self, batch: Tensor) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Tensor]:
        return repeat(self.batch, len(self))

    def __len__(self) -> int:
        return 10**6


class Gan(lightning.LightningModule):
    """DCGAN by the book."""

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
        of_generator, of_discriminator = self.optimizers()
        fake = self.generator(torch.randn(len(real), NOISE, device=self.device))
        self.toggle_optimizer(of_generator)
        logits = self.discriminator(fake)
        loss = F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))
        self.log("generator", loss, prog_bar=True)
        self.manual_backward(loss)
        of_generator.step()
        of_generator.zero_grad()
        self.untoggle_optimizer(of_generator)
        self.toggle_optimizer(of_discriminator)
        on_real, on_fake = self.discriminator(real), self.discriminator(fake.detach())
        loss = F.binary_cross_entropy_with_logits(on_real, torch.ones_like(on_real))
        loss = loss + F.binary_cross_entropy_with_logits(on_fake, torch.zeros_like(on_fake))
        self.log("discriminator", loss, prog_bar=True)
        self.manual_backward(loss)
        of_discriminator.step()
        of_discriminator.zero_grad()
        self.untoggle_optimizer(of_discriminator)


class Clock(lightning.Callback):
    """When the fit's first steps, and all of them, were done."""

    def __init__(self, device: torch.device, last: int) -> None:
        self.device, self.last, self.seconds = device, last, 0.0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
        done = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        if done == WARMUP_BATCHES or done == self.last:
            wait_for(self.device)
            self.seconds = perf_counter() - self.seconds


def make_fit(data: Iterable[Any], width: int, device: torch.device, folder: Path, compiled: bool = False) -> Fit:
    """A function that fits for so many steps and gives the seconds that they took."""

    def fit(steps: int) -> float:
        torch_defaults()
        clock = Clock(device, WARMUP_BATCHES + steps)
        trainer = lightning.Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=1,
            precision="bf16-mixed" if device.type == "cuda" else "32-true",
            max_steps=2 * clock.last,  # it counts the steps of both optimizers
            callbacks=[clock],
            logger=lightning.pytorch.loggers.CSVLogger(str(folder)),
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )
        trainer.fit(Gan(width, compiled), data)
        return clock.seconds

    return fit


def sides(options: argparse.Namespace, folder: Path, device: torch.device, pictures: np.ndarray) -> dict[str, Fit]:
    """Every way to train, by name."""
    np.savez(
        folder / "random.npz",
        x_train=pictures,
        y_train=np.zeros(len(pictures), int),
        x_test=pictures[:1],
        y_test=np.zeros(1, int),
    )
    fits: dict[str, Fit] = {}
    for workers in map(int, options.workers.split(",")):
        loader = DataLoader(
            Pictures(pictures),
            options.batch,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=device.type == "cuda",
        )
        fits[f"Trainer, {workers} workers"] = make_fit(loader, options.width, device, folder)
    batch = torch.stack([Pictures(pictures)[index] for index in range(options.batch)]).to(device)
    fits["Trainer, no loading"] = make_fit(Repeated(batch), options.width, device, folder)
    if options.compile:
        fits["Trainer, no loading, compiled"] = make_fit(Repeated(batch), options.width, device, folder, compiled=True)
    settings: dict[str, Any] = {"data": "npz", "data_root": folder / "random.npz", "batch_size": options.batch}
    settings |= {"size": SIDE_PX, "channels": 3, "flip": "off", "smallest": 2}
    settings |= {"ngf": options.width, "ndf": options.width, "loader": "resident"}
    engine = engine_side("engine", "dcgan", folder, **settings)
    block(engine, engine.warmup, device)
    fits["engine"] = lambda steps: block(engine, steps, device)
    return fits


def main() -> None:
    """Measures all sides in turns, prints a table and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--width", type=int, default=64, help="channels of the networks")
    parser.add_argument("--samples", type=int, default=50_000, help="pictures in the data")
    parser.add_argument("--workers", default=f"2,{os.cpu_count()}", help="of the Trainer's DataLoader, with commas")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a block, about")
    parser.add_argument("--repeats", type=int, default=5, help="blocks of each side")
    parser.add_argument("--compile", action="store_true", help="the Trainer with compiled networks too")
    parser.add_argument("--json", default="", help="file for the numbers, with versions and hardware")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    pictures = np.random.default_rng(0).integers(256, size=(options.samples, SIDE_PX, SIDE_PX, 3), dtype=np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        fits = sides(options, Path(folder), device, pictures)
        lengths = {name: max(2, round(options.seconds / (fit(10) / 10))) for name, fit in fits.items()}
        rates: dict[str, list[float]] = {name: [] for name in fits}
        for turn in range(options.repeats):
            for name in list(fits) if turn % 2 == 0 else reversed(fits):
                rates[name].append(lengths[name] * options.batch / fits[name](lengths[name]))
            rows = rates_as_rows(rates, list(lengths.values()))
            keep_json(options.json, options, rows=rows)
    print_rows(
        f"DCGAN, {SIDE_PX} pixels, batch {options.batch}, lightning {lightning.__version__}, {device.type}", rows
    )


if __name__ == "__main__":
    main()
