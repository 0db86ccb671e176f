"""How much faster the engine trains than plain scripts of the kind that it replaces, data included.

The plain loops are written here, in the style of the projects whose scripts Paceline replaces: fp32 (ResNet-18: fp16
with a scaler), networks as they are, a sigmoid with BCELoss, `.item()` of every loss in every step, torch's DataLoader
over Pillow with a few workers that start anew in each epoch. The engine trains the same networks on the same pictures
as it does by default: data resident on the device, bf16 and the whole step as a CUDA graph where there is a GPU; with
`--compile` compiled, too. Blocks of steps of all sides take turns; a block ends when the device is done. What a plain
loader has ready when its block begins is not taken from it. With photographs, where that would be most of a block, a
plain loop's block is a whole epoch, its workers' start included.

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

import numpy as np
import torch
import torch.nn.functional as F
from _sides import Side, endless, engine_side, keep_json, print_rows, take_turns, torch_defaults
from photo_loading import make_picture
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from paceline.models.dcgan import Discriminator, Generator
from paceline.models.features import Features
from paceline.models.resnet import ResNet
from paceline.models.srresnet import Discriminator as PhotoDiscriminator
from paceline.models.srresnet import SRResNet

SIDE_PX, NUM_CLASSES, NOISE, SCALE = 32, 100, 100, 4
HALF = transforms.Normalize([0.5] * 3, [0.5] * 3)
Batches = Iterator[list[Tensor]]
MakeStep = Callable[[Batches, torch.device, argparse.Namespace], Callable[[], None]]


class Pictures(Dataset):
    """Small pictures in memory, each through Pillow and torchvision's transforms, as torchvision's CIFAR has them."""

    def __init__(self, pictures: np.ndarray, labels: np.ndarray, augmented: bool) -> None:
        self.pictures, self.labels = pictures, labels
        moved = [transforms.RandomCrop(SIDE_PX, padding=4), transforms.RandomHorizontalFlip()] if augmented else []
        self.transform = transforms.Compose([*moved, transforms.ToTensor(), HALF])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.pictures[index])), int(self.labels[index])


class Photographs(Dataset):
    """Windows of photographs, decoded each time, with the small picture made by Pillow."""

    def __init__(self, files: list[Path], crop: int, length: int) -> None:
        self.files, self.length = files, length
        self.cut = transforms.RandomCrop(crop)
        self.smaller = transforms.Resize(crop // SCALE, transforms.InterpolationMode.BICUBIC)
        self.finish = transforms.Compose([transforms.ToTensor(), HALF])

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        high = self.cut(Image.open(self.files[index % len(self.files)]).convert("RGB"))
        return self.finish(self.smaller(high)), self.finish(high)


def adversaries(options: argparse.Namespace, device: torch.device, discriminators: int) -> tuple[nn.Module, ...]:
    """A generator and discriminators that end in a sigmoid."""
    width = 4 if options.tiny else 64
    judges = [nn.Sequential(Discriminator(SIDE_PX, 3, width, 2), nn.Sigmoid()) for _ in range(discriminators)]
    return Generator(SIDE_PX, 3, NOISE, width, 2).to(device), *(evaluator.to(device) for evaluator in judges)


def gan_step(batches: Batches, device: torch.device, options: argparse.Namespace, discriminators: int = 1):
    """DCGAN's step, or with two discriminators the dual GAN's, in which their errors choose the generator's one."""
    generator, *judges = adversaries(options, device, discriminators)
    bce = nn.BCELoss()
    rate = {"lr": 2e-4, "betas": (0.5, 0.999)}
    optimizer = torch.optim.Adam(generator.parameters(), **rate)
    optimizers = [torch.optim.Adam(evaluator.parameters(), **rate) for evaluator in judges]
    seen: list[float] = []

    def step() -> None:
        real = next(batches)[0].to(device)
        ones, zeros = torch.ones(len(real), device=device), torch.zeros(len(real), device=device)
        fake = generator(torch.randn(len(real), NOISE, device=device))
        errors = []
        for evaluator, own in zip(judges, optimizers, strict=True):
            evaluator.zero_grad()
            on_real = evaluator(real)
            error_real = bce(on_real, ones)
            error_real.backward()
            on_fake = evaluator(fake.detach())
            error_fake = bce(on_fake, zeros)
            error_fake.backward()
            own.step()
            errors.append((error_real.item(), error_fake.item()))
            seen[:] = [on_real.mean().item(), on_fake.mean().item()]
        chosen = 0
        if len(judges) == 2:
            chosen = int(errors[0][0] + errors[1][1] < errors[1][0] + errors[0][1])
        generator.zero_grad()
        loss = bce(judges[chosen](fake), ones)
        loss.backward()
        optimizer.step()
        seen.append(loss.item())

    return step


def classification_step(batches: Batches, device: torch.device, options: argparse.Namespace) -> Callable[[], None]:
    """ResNet-18 in fp16 with a scaler."""
    network = ResNet(18, NUM_CLASSES, stem="small", width=4 if options.tiny else 64).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    half = torch.float16 if device.type == "cuda" else torch.bfloat16
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
    seen: list[float] = []

    def step() -> None:
        pictures, labels = (part.to(device) for part in next(batches))
        optimizer.zero_grad()
        with torch.autocast(device.type, half, enabled=device.type == "cuda"):
            logits = network(pictures)
            loss = F.cross_entropy(logits, labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        seen[:] = [loss.item(), (logits.argmax(1) == labels).float().mean().item()]

    return step


def photo_step(batches: Batches, device: torch.device, options: argparse.Namespace) -> Callable[[], None]:
    """SRGAN ×4 with VGG19's features; its blocks share one block's weights."""
    width, blocks = (4, 1) if options.tiny else (64, 16)
    generator = SRResNet(scale=SCALE, width=width, num_blocks=blocks, shared=True, output="tanh").to(device)
    evaluator = nn.Sequential(PhotoDiscriminator(3, width), nn.Sigmoid()).to(device)
    features, bce = Features("random", "relu5_4"), nn.BCELoss()
    optimizers = [torch.optim.Adam(network.parameters(), lr=1e-4) for network in (generator, evaluator)]
    seen: list[float] = []

    def step() -> None:
        low, high = (part.to(device) for part in next(batches))
        ones, zeros = torch.ones(len(high), device=device), torch.zeros(len(high), device=device)
        fake = generator(low)
        evaluator.zero_grad()
        loss_judge = bce(evaluator(high), ones) + bce(evaluator(fake.detach()), zeros)
        loss_judge.backward()
        optimizers[1].step()
        generator.zero_grad()
        steps = [fake.diff(dim=dim).square().sum() for dim in (-1, -2)]
        loss = F.mse_loss(fake, high) + 0.006 * F.mse_loss(features(fake), features(high))
        loss = loss + 1e-3 * bce(evaluator(fake), ones) + 2e-8 * sum(steps) / len(high)
        loss.backward()
        optimizers[0].step()
        seen[:] = [loss.item(), loss_judge.item()]

    return step


def reference_sides(
    data: Dataset, batch_size: int, make: MakeStep, device: torch.device, options, epochs: bool = False
) -> list[Side]:
    """The plain loop with each number of workers, in steps or whole epochs, and with a batch that is there already."""
    sides = []
    for workers in map(int, options.workers.split(",")):
        loader = DataLoader(data, batch_size, shuffle=True, num_workers=workers, drop_last=True)
        step = make(endless(loader), device, options)
        side = Side(f"reference style, {workers} workers", step, torch_defaults)
        sides.append(in_epochs(side, len(loader), batch_size) if epochs else side)
    batch = [part.to(device) for part in next(iter(DataLoader(data, batch_size)))]
    step = make(iter(lambda: batch, None), device, options)
    return [*sides, Side("reference style, no loading", step, torch_defaults)]


def in_epochs(side: Side, num_steps: int, batch_size: int) -> Side:
    """The same side with an epoch as its step and its block: nothing is loaded between two of them."""

    def epoch() -> None:
        for _ in range(num_steps):
            side.step()

    return Side(side.name, epoch, side.before, side.after, warmup=0, images=num_steps * batch_size, length=1)


def engine_sides(recipe: str, folder: Path, options: argparse.Namespace, **settings: object) -> list[Side]:
    """The engine as it is, and compiled where that is asked for."""
    sides = [engine_side("engine", recipe, folder, loader="resident", **settings)]
    if options.compile:
        sides.append(engine_side("engine, compiled", recipe, folder, loader="resident", compile=True, **settings))
    return sides


def small_picture_file(folder: Path, samples: int) -> dict[str, np.ndarray]:
    """Random pictures and labels, kept as an .npz source has them."""
    chance = np.random.default_rng(0)
    data: dict[str, np.ndarray] = {}
    for split, length in (("train", samples), ("test", 1)):
        data[f"x_{split}"] = chance.integers(256, size=(length, SIDE_PX, SIDE_PX, 3), dtype=np.uint8)
        data[f"y_{split}"] = chance.integers(NUM_CLASSES, size=length)
    data["y_test"][0] = NUM_CLASSES - 1
    np.savez(folder / "random.npz", **data)  # type: ignore[arg-type]
    return data


def photo_folder(folder: Path, options: argparse.Namespace) -> list[Path]:
    """Photographs as PNG files, made once where a folder is named."""
    width, height = (int(word) for word in options.photo_size.split("x"))
    for split, count in (("train", options.photos), ("test", 1)):
        (folder / split).mkdir(parents=True, exist_ok=True)
        make = partial(make_picture, folder=folder / split, width=width, height=height)
        with ProcessPoolExecutor() as processes:
            list(processes.map(make, range(count)))
    return sorted((folder / "train").glob("*.png"))[: options.photos]


def sides_of(workload: str, folder: Path, device: torch.device, options) -> tuple[list[Side], int]:
    """The sides of a workload, and its batch."""
    batch = options.batch or (512 if workload == "resnet512" else 128)
    narrow = options.tiny
    if workload == "srgan":
        crop = options.crop
        photos = Path(options.photo_folder or folder / "photos")
        files = photo_folder(photos, options)
        epoch = Photographs(files, crop, options.photo_epoch)
        sides = reference_sides(epoch, batch, photo_step, device, options, epochs=True)
        own: dict[str, object] = {"data": "photos", "data_root": photos, "crop": crop, "vgg": "random", "workers": 8}
        own |= {"preset": "reference", "stage": "adversarial"}
        own |= {"num_blocks": 1, "width": 4, "d_width": 4, "workers": 2} if narrow else {}
        return sides + engine_sides("super_resolution", folder, options, batch_size=batch, **own), batch
    data = small_picture_file(folder, options.samples)
    common = {"data": "npz", "data_root": folder / "random.npz", "batch_size": batch}
    if workload.startswith("resnet"):
        plain = Pictures(data["x_train"], data["y_train"], augmented=True)
        sides = reference_sides(plain, batch, classification_step, device, options)
        own = {"stem": "small", "pad_crop": 4, "flip": "on", "width": 4 if narrow else 64}
        return sides + engine_sides("classification", folder, options, **common, **own), batch
    recipe, count = ("dual_gan", 2) if workload == "dual-gan" else ("dcgan", 1)
    plain = Pictures(data["x_train"], data["y_train"], augmented=False)
    sides = reference_sides(plain, batch, partial(gan_step, discriminators=count), device, options)
    own = {"size": SIDE_PX, "channels": 3, "flip": "off", "smallest": 2}
    own |= {"ngf": 4, "ndf": 4} if narrow else {}
    return sides + engine_sides(recipe, folder, options, **common, **own), batch


WORKLOADS = ("dual-gan", "dcgan", "resnet", "resnet512", "srgan")


def main() -> None:
    """Measures each workload, prints its table and writes all as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="which of them, with commas")
    parser.add_argument("--seconds", type=float, default=1.5, help="of a block, about; two steps at least")
    parser.add_argument("--repeats", type=int, default=5, help="blocks of each side")
    parser.add_argument("--workers", default=f"2,{os.cpu_count()}", help="of the plain loops' loaders, with commas")
    parser.add_argument("--compile", action="store_true", help="the engine with its networks compiled too")
    parser.add_argument("--samples", type=int, default=50_000, help="small pictures in the data")
    parser.add_argument("--batch", type=int, default=0, help="images per step (default: 128, and 512 for resnet512)")
    parser.add_argument("--crop", type=int, default=128, help="of the photographs")
    parser.add_argument("--photos", type=int, default=800, help="photographs in the folder")
    parser.add_argument("--photo-epoch", type=int, default=800, help="windows of them in an epoch")
    parser.add_argument("--photo-repeats", type=int, default=3, help="blocks of each side with photographs")
    parser.add_argument("--photo-size", default="2040x1356")
    parser.add_argument("--photo-folder", default="", help="where they are made and kept (default: for this run only)")
    parser.add_argument("--tiny", action="store_true", help="narrow networks, to try the script without a GPU")
    parser.add_argument("--json", default="", help="file for the numbers, with versions and hardware")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results: dict[str, dict[str, object]] = {}

    def keep(workload: str, batch: int, rows: list[dict[str, object]]) -> None:
        results[workload] = {"workload": workload, "batch": batch, "rows": rows}
        keep_json(options.json, options, workloads=list(results.values()))

    for workload in options.workloads.split(","):
        if workload not in WORKLOADS:
            parser.error(f"--workloads {workload}: there are {', '.join(WORKLOADS)}")
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            sides, batch = sides_of(workload, Path(folder), device, options)
            repeats = options.photo_repeats if workload == "srgan" else options.repeats
            rows = take_turns(sides, batch, options.seconds, repeats, device, partial(keep, workload, batch))
        print_rows(f"{workload}, batch {batch}, on {device.type}", rows)
        del sides
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
