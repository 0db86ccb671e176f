"""Measure the engine's speedup, including data loading, over the kind of plain script that it replaces.

The plain loops are written in the style of the projects whose scripts Paceline replaces: fp32 (ResNet-18: fp16 with a
scaler), a sigmoid with BCELoss, `.item()` on every loss in every step, and torch's DataLoader over Pillow with a few
workers that are started for each epoch. The engine trains the same networks on the same images with its defaults: data
resident on the device and, on a GPU, bf16 and the whole step as a CUDA graph. With `--compile`, a compiled variant is
measured too. Blocks of steps are interleaved. A block ends when the device has finished its work. Batches that a plain
loader has prefetched when its block starts count in its favour. With photographs, they would make up most of a block,
so a plain loop's block is a whole epoch, including the time to start its workers.

    PYTHONPATH=src python benchmarks/reference_style.py --compile --json reference_style.json
    PYTHONPATH=src python benchmarks/reference_style.py --tiny --seconds 0.2 --repeats 3   # on a CPU
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from _variants import (
    NUM_CLASSES,
    SIDE_PX,
    Variant,
    endless,
    engine_variant,
    measure_interleaved,
    print_rows,
    set_torch_defaults,
    write_results,
    write_small_images,
)
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from paceline.data.sources.photos import Photos
from paceline.models.dcgan import Discriminator, Generator
from paceline.models.features import Features
from paceline.models.resnet import ResNet
from paceline.models.srresnet import Discriminator as PhotoDiscriminator
from paceline.models.srresnet import SRResNet

NOISE, SCALE = 100, 4
SMALLEST_PX = 400  # minimum side length of the photographs to enlarge
NOISE_LEVELS = 2.0
HALF = transforms.Normalize([0.5] * 3, [0.5] * 3)
Batches = Iterator[list[Tensor]]
MakeStep = Callable[[Batches, torch.device, argparse.Namespace], Callable[[], None]]


class Images(Dataset[tuple[Tensor, int]]):
    """Small images in memory, read through Pillow and torchvision's transforms, like torchvision's CIFAR."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, augmented: bool) -> None:
        self.images, self.labels = images, labels
        augmentations = (
            [transforms.RandomCrop(SIDE_PX, padding=4), transforms.RandomHorizontalFlip()] if augmented else []
        )
        self.transform = transforms.Compose([*augmentations, transforms.ToTensor(), HALF])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), int(self.labels[index])


class Photographs(Dataset[tuple[Tensor, Tensor]]):
    """Crops of photographs, decoded each time and downscaled by Pillow to low-resolution images."""

    def __init__(self, files: list[Path], crop: int, length: int) -> None:
        self.files, self.length = files, length
        self.crop = transforms.RandomCrop(crop)
        self.downsample = transforms.Resize(crop // SCALE, transforms.InterpolationMode.BICUBIC)
        self.finish = transforms.Compose([transforms.ToTensor(), HALF])

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        high = self.crop(Image.open(self.files[index % len(self.files)]).convert("RGB"))
        return self.finish(self.downsample(high)), self.finish(high)


def gan_networks(options: argparse.Namespace, device: torch.device, count: int) -> tuple[nn.Module, ...]:
    """Return a generator, and discriminators that end in a sigmoid."""
    width = 4 if options.tiny else 64
    discriminators = [nn.Sequential(Discriminator(SIDE_PX, 3, width, 2), nn.Sigmoid()) for _ in range(count)]
    return Generator(SIDE_PX, 3, NOISE, width, 2).to(device), *(network.to(device) for network in discriminators)


def gan_step(
    batches: Batches, device: torch.device, options: argparse.Namespace, num_discriminators: int = 1
) -> Callable[[], None]:
    """Return the step for DCGAN or the dual GAN, whose losses select the discriminator that trains the generator."""
    generator, *discriminators = gan_networks(options, device, num_discriminators)
    bce = nn.BCELoss()
    optimizer, *optimizers = (
        torch.optim.Adam(network.parameters(), lr=2e-4, betas=(0.5, 0.999)) for network in (generator, *discriminators)
    )
    logged: list[float] = []

    def step() -> None:
        real = next(batches)[0].to(device)
        ones, zeros = torch.ones(len(real), device=device), torch.zeros(len(real), device=device)
        fake = generator(torch.randn(len(real), NOISE, device=device))
        losses = []
        for discriminator, discriminator_optimizer in zip(discriminators, optimizers, strict=True):
            discriminator.zero_grad()
            on_real = discriminator(real)
            loss_real = bce(on_real, ones)
            loss_real.backward()
            on_fake = discriminator(fake.detach())
            loss_fake = bce(on_fake, zeros)
            loss_fake.backward()
            discriminator_optimizer.step()
            losses.append((loss_real.item(), loss_fake.item()))
            logged[:] = [on_real.mean().item(), on_fake.mean().item()]
        chosen = 0
        if len(discriminators) == 2:
            chosen = int(losses[0][0] + losses[1][1] < losses[1][0] + losses[0][1])
        generator.zero_grad()
        loss = bce(discriminators[chosen](fake), ones)
        loss.backward()
        optimizer.step()
        logged.append(loss.item())

    return step


def classification_step(batches: Batches, device: torch.device, options: argparse.Namespace) -> Callable[[], None]:
    """Return the step for ResNet-18 in fp16 with a scaler."""
    network = ResNet(18, NUM_CLASSES, stem="small", width=4 if options.tiny else 64).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    half = torch.float16 if device.type == "cuda" else torch.bfloat16
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
    logged: list[float] = []

    def step() -> None:
        images, labels = (part.to(device) for part in next(batches))
        optimizer.zero_grad()
        with torch.autocast(device.type, half, enabled=device.type == "cuda"):
            logits = network(images)
            loss = F.cross_entropy(logits, labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        logged[:] = [loss.item(), (logits.argmax(1) == labels).float().mean().item()]

    return step


def photo_step(batches: Batches, device: torch.device, options: argparse.Namespace) -> Callable[[], None]:
    """Return the step for SRGAN ×4 with VGG19 features; its residual blocks share weights."""
    width, blocks = (4, 1) if options.tiny else (64, 16)
    generator = SRResNet(scale=SCALE, width=width, num_blocks=blocks, shared=True, output="tanh").to(device)
    discriminator = nn.Sequential(PhotoDiscriminator(3, width), nn.Sigmoid()).to(device)
    features, bce = Features("random", "relu5_4"), nn.BCELoss()
    optimizers = [torch.optim.Adam(network.parameters(), lr=1e-4) for network in (generator, discriminator)]
    logged: list[float] = []

    def step() -> None:
        low, high = (part.to(device) for part in next(batches))
        ones, zeros = torch.ones(len(high), device=device), torch.zeros(len(high), device=device)
        fake = generator(low)
        discriminator.zero_grad()
        discriminator_loss = bce(discriminator(high), ones) + bce(discriminator(fake.detach()), zeros)
        discriminator_loss.backward()
        optimizers[1].step()
        generator.zero_grad()
        differences = [fake.diff(dim=dim).square().sum() for dim in (-1, -2)]
        loss = F.mse_loss(fake, high) + 0.006 * F.mse_loss(features(fake), features(high))
        loss = loss + 1e-3 * bce(discriminator(fake), ones) + 2e-8 * sum(differences) / len(high)
        loss.backward()
        optimizers[0].step()
        logged[:] = [loss.item(), discriminator_loss.item()]

    return step


def reference_variants(
    data: Dataset[Any],
    batch_size: int,
    make: MakeStep,
    device: torch.device,
    options: argparse.Namespace,
    epochs: bool = False,
) -> list[Variant]:
    """Return a plain loop for each number of workers, and one that reuses a batch on the device."""
    variants = []
    for workers in dict.fromkeys(map(int, options.workers.split(","))):
        loader = DataLoader(data, batch_size, shuffle=True, num_workers=workers, drop_last=True)
        step = make(endless(loader), device, options)
        variant = Variant(f"reference style, {workers} workers", step, set_torch_defaults)
        variants.append(in_epochs(variant, len(loader), batch_size) if epochs else variant)
    batch = [part.to(device) for part in next(iter(DataLoader(data, batch_size)))]
    step = make(iter(lambda: batch, None), device, options)
    return [*variants, Variant("reference style, no loading", step, set_torch_defaults)]


def in_epochs(variant: Variant, num_steps: int, batch_size: int) -> Variant:
    """Return a variant whose step and block are one epoch, so that nothing is prefetched between blocks."""

    def epoch() -> None:
        for _ in range(num_steps):
            variant.step()

    images = num_steps * batch_size
    return Variant(variant.name, epoch, variant.before, warmup=0, images=images, length=1)


def engine_variants(recipe: str, folder: Path, options: argparse.Namespace, **settings: Any) -> list[Variant]:
    """Return the engine with its defaults and, with `--compile`, also a compiled variant."""
    variants = [engine_variant("engine", recipe, folder, loader="resident", compile="off", **settings)]
    if options.compile:
        variants.append(engine_variant("engine, compiled", recipe, folder, loader="resident", compile=True, **settings))
    return variants


def make_image(number: int, folder: Path, width: int, height: int) -> None:
    """Write one image unless it exists; its content depends only on its number."""
    file = folder / f"{number:04}.png"
    if file.is_file():
        return
    photos = Photos("train", Photos.Settings(crop=SMALLEST_PX, bad_images="skip"))
    rng = np.random.default_rng(number)
    photo = Image.fromarray(photos.read(int(rng.integers(len(photos))))["image"])
    share = rng.uniform(0.6, 1.0)
    part_width = int(min(photo.width, photo.height * width / height) * share)
    part_height = int(part_width * height / width)
    left, top = rng.integers(photo.width - part_width + 1), rng.integers(photo.height - part_height + 1)
    box = (int(left), int(top), int(left) + part_width, int(top) + part_height)
    large = np.asarray(photo.resize((width, height), Image.Resampling.BICUBIC, box), dtype=np.float32)
    noisy = large + NOISE_LEVELS * rng.standard_normal(large.shape, dtype=np.float32)
    Image.fromarray(noisy.round().clip(0, 255).astype(np.uint8)).save(file)


def write_photos(folder: Path, options: argparse.Namespace) -> list[Path]:
    """Write photographs as PNG files unless they exist; return the files in the training split."""
    width, height = (int(word) for word in options.photo_size.split("x"))
    for split, count in (("train", options.photos), ("test", 1)):
        (folder / split).mkdir(parents=True, exist_ok=True)
        make = partial(make_image, folder=folder / split, width=width, height=height)
        with ProcessPoolExecutor() as processes:
            list(processes.map(make, range(count)))
    return sorted((folder / "train").glob("*.png"))[: options.photos]


def make_variants(
    workload: str, folder: Path, device: torch.device, options: argparse.Namespace
) -> tuple[list[Variant], int]:
    """Return a workload's variants and its batch size."""
    batch = options.batch or (512 if workload == "resnet512" else 128)
    narrow = options.tiny
    if workload == "srgan":
        crop = options.crop
        photos = Path(options.photo_folder or folder / "photos")
        files = write_photos(photos, options)
        epoch = Photographs(files, crop, options.photo_epoch)
        variants = reference_variants(epoch, batch, photo_step, device, options, epochs=True)
        own: dict[str, object] = {"data": "photos", "data_root": photos, "crop": crop, "vgg": "random", "workers": 8}
        own |= {"preset": "reference", "stage": "adversarial"}
        own |= {"num_blocks": 1, "width": 4, "d_width": 4, "workers": 2} if narrow else {}
        return variants + engine_variants("super_resolution", folder, options, batch_size=batch, **own), batch
    data = write_small_images(folder, options.samples)
    common = {"data": "npz", "data_root": folder / "random.npz", "batch_size": batch}
    if workload.startswith("resnet"):
        plain = Images(data["x_train"], data["y_train"], augmented=True)
        variants = reference_variants(plain, batch, classification_step, device, options)
        own = {"stem": "small", "pad_crop": 4, "flip": "on", "width": 4 if narrow else 64}
        return variants + engine_variants("classification", folder, options, **common, **own), batch
    recipe, count = ("dual_gan", 2) if workload == "dual-gan" else ("dcgan", 1)
    plain = Images(data["x_train"], data["y_train"], augmented=False)
    variants = reference_variants(plain, batch, partial(gan_step, num_discriminators=count), device, options)
    own = {"size": SIDE_PX, "channels": 3, "flip": "off", "smallest": 2}
    own |= {"ngf": 4, "ndf": 4} if narrow else {}
    return variants + engine_variants(recipe, folder, options, **common, **own), batch


WORKLOADS = ("dual-gan", "dcgan", "resnet", "resnet512", "srgan")


def main() -> None:
    """Measure each workload, print its table and write all results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="comma-separated workloads")
    parser.add_argument(
        "--seconds", type=float, default=1.5, help="approximate length of a block of at least two steps"
    )
    parser.add_argument("--repeats", type=int, default=5, help="number of blocks per variant")
    parser.add_argument(
        "--workers", default=f"2,{os.cpu_count()}", help="comma-separated worker counts of the plain loaders"
    )
    parser.add_argument("--compile", action="store_true", help="also measure the engine with compiled networks")
    parser.add_argument("--samples", type=int, default=50_000, help="number of small images")
    parser.add_argument("--batch", type=int, default=0, help="images per step (default: 128, and 512 for resnet512)")
    parser.add_argument("--crop", type=int, default=128, help="side length of the photograph crops, in pixels")
    parser.add_argument("--photos", type=int, default=800, help="number of photographs")
    parser.add_argument("--photo-epoch", type=int, default=800, help="number of crops in an epoch of photographs")
    parser.add_argument("--photo-repeats", type=int, default=3, help="number of blocks per variant with photographs")
    parser.add_argument("--photo-size", default="2040x1356", help="size of the photographs, in pixels")
    parser.add_argument(
        "--photo-folder", default="", help="folder in which photographs are created and kept (default: a temporary one)"
    )
    parser.add_argument("--tiny", action="store_true", help="use narrow networks, to test the script without a GPU")
    parser.add_argument("--json", default="", help="JSON file for the results, with versions and hardware")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results: dict[str, dict[str, object]] = {}

    def save(workload: str, batch: int, rows: list[dict[str, object]]) -> None:
        results[workload] = {"workload": workload, "batch": batch, "rows": rows}
        write_results(options.json, options, workloads=list(results.values()))

    for workload in options.workloads.split(","):
        if workload not in WORKLOADS:
            parser.error(f"--workloads {workload}: expected some of {', '.join(WORKLOADS)}")
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            variants, batch = make_variants(workload, Path(folder), device, options)
            repeats = options.photo_repeats if workload == "srgan" else options.repeats
            on_turn = partial(save, workload, batch)
            rows = measure_interleaved(variants, batch, options.seconds, repeats, device, on_turn)
        print_rows(f"{workload}, batch {batch}, on {device.type}", rows)
        del variants
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
