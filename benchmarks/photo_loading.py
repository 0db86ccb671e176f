"""Measure how long an epoch of random crops takes to load if large photographs are decoded each time or only once.

The images are created once and kept in the folder: enlarged crops of the bundled photographs, with a little noise
so that their PNG files are as large as a camera's. These variants load the crops, without training a model:

- `decode each time`: torch's DataLoader over Pillow, torchvision's RandomCrop and ToTensor, as in a plain script, with
  each of the given worker counts; the workers are restarted for each epoch;
- `resident`: all pixels are held in memory: on the device if they fit, else on the host, as in a run
  (if they fit on neither, the row shows `workers`, which also decodes each time);
- `packed`: worker processes read crops from a memory map.

In every variant, an epoch ends with its batches as floats on the device. The median excludes the first epoch; the
time to read or pack everything once is printed alongside it.

    PYTHONPATH=src python benchmarks/photo_loading.py --folder photos-2k --json photo_loading.json
    PYTHONPATH=src python benchmarks/photo_loading.py --folder photos-2k --images 40 --batch-size 8 --workers 0,2
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from paceline.commands.pack import pack
from paceline.config.settings import RunSettings
from paceline.data.feed import BatchPipeline
from paceline.data.loader import Loader, choose_loader
from paceline.data.loaders.workers import Workers
from paceline.data.sources.packed import Packed
from paceline.data.sources.photos import Photos
from paceline.data.stream import Stream
from paceline.data.transforms import Augment
from paceline.runs.provenance import versions_and_hardware

NOISE_LEVELS = 2.0
SMALLEST_PX = 400  # minimum side length of the photographs to enlarge
Epoch = Callable[[int], None]


@lru_cache(maxsize=1)
def photographs() -> Photos:
    """Return the photographs from which the images are created."""
    return Photos("train", Photos.Settings(crop=SMALLEST_PX, bad_images="skip"))


def make_image(number: int, folder: Path, width: int, height: int) -> None:
    """Write one image unless it exists; its content depends only on its number."""
    file = folder / f"{number:04}.png"
    if file.is_file():
        return
    photos = photographs()
    rng = np.random.default_rng(number)
    photo = Image.fromarray(photos.read(int(rng.integers(len(photos))))["image"])
    share = rng.uniform(0.6, 1.0)
    part_width = int(min(photo.width, photo.height * width / height) * share)
    part_height = int(part_width * height / width)
    left, top = rng.integers(photo.width - part_width + 1), rng.integers(photo.height - part_height + 1)
    box = (int(left), int(top), int(left) + part_width, int(top) + part_height)
    large = np.asarray(photo.resize((width, height), Image.Resampling.BICUBIC, box), dtype=np.float32)
    noisy = large + NOISE_LEVELS * rng.standard_normal(large.shape, dtype=np.float32)
    temporary = file.with_suffix(".new")
    Image.fromarray(noisy.round().clip(0, 255).astype(np.uint8)).save(temporary, "PNG")
    temporary.rename(file)


class DecodeEachTime(Dataset[torch.Tensor]):
    """The dataset of a plain script: open, crop at random, convert to float."""

    def __init__(self, files: list[Path], crop: int) -> None:
        self.files = files
        self.transform = transforms.Compose(
            [transforms.RandomCrop(crop), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
        )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        image: torch.Tensor = self.transform(Image.open(self.files[index]).convert("RGB"))
        return image * 2 - 1


def plain_epoch(files: list[Path], crop: int, batch_size: int, workers: int, device: torch.device) -> Epoch:
    """Return a function that loads an epoch as a plain script does."""
    loader = DataLoader(
        DecodeEachTime(files, crop),
        batch_size,
        shuffle=True,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        drop_last=True,
    )

    def epoch(number: int) -> None:
        for batch in loader:
            batch.to(device, non_blocking=True)

    return epoch


def our_epoch(loader: Loader, batch_size: int) -> Epoch:
    """Return a function that loads an epoch as floats, using one of Paceline's loaders and random flips."""
    stream, steps = Stream(0, len(loader.source)), len(loader.source) // batch_size
    starts = itertools.count(0, batch_size)
    pipeline = BatchPipeline(loader, Augment(flip=True), torch.float32)
    batches = pipeline.batches(stream.take(start, start + batch_size) for start in starts)

    def epoch(number: int) -> None:
        for _ in itertools.islice(batches, steps):
            pass

    return epoch


def timed(epoch: Epoch, number: int, device: torch.device) -> float:
    """Return the elapsed seconds for one epoch, including work queued on the device."""
    start = perf_counter()
    epoch(number)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - start


def variants(options: argparse.Namespace, device: torch.device) -> Iterator[tuple[str, Epoch, float, str]]:
    """For each variant, yield its name, a function that loads one epoch, and its preparation's duration and name."""
    folder = Path(options.folder)
    files = sorted((folder / "train").glob("*.png"))[: options.images]
    for workers in (int(word) for word in options.workers.split(",")):
        epoch = plain_epoch(files, options.crop, options.batch_size, workers, device)
        yield f"decode each time, {workers} workers", epoch, 0.0, ""
    settings = Photos.Settings(
        data_root=str(folder), test_root=str(folder / "train"), crop=options.crop, workers=options.our_workers
    )
    start = perf_counter()
    source = Photos("train", settings)
    choice = choose_loader(settings, source, device)
    loader = choice.build(source, device, settings, options.crop)
    print(f"loader {choice.name}: {choice.reason}")
    where = " on the host" if choice.home and choice.home != device else ""
    preparation = "reading once" if choice.home else ""
    yield f"{choice.name}{where}", our_epoch(loader, options.batch_size), perf_counter() - start, preparation
    loader.close()
    packed = folder.with_name(f"{folder.name}-packed")
    start = perf_counter()
    pack(str(folder), str(packed), {"workers": options.our_workers}, {"test_root": str(folder / "test")})
    seconds = perf_counter() - start
    of_packed = RunSettings(data_root=str(packed), crop=options.crop, workers=options.our_workers)
    loader = Workers(Packed("train", of_packed), device, of_packed, options.crop)
    yield (
        f"packed, {options.our_workers} workers",
        our_epoch(loader, options.batch_size),
        seconds,
        "packing once, or checking the pack",
    )
    loader.close()


def measure(options: argparse.Namespace, device: torch.device) -> list[dict[str, object]]:
    """Print and return one row per variant."""
    rows: list[dict[str, object]] = []
    print(f"{'loading':<28} {'median s/epoch':>14} {'lowest':>8} {'highest':>8} {'n':>3} {'images/s':>11}")
    for name, epoch, preparation_seconds, preparation in variants(options, device):
        seconds = [timed(epoch, number, device) for number in range(options.epochs)][1:]
        middle = median(seconds)
        used = options.images // options.batch_size * options.batch_size
        print(
            f"{name:<28} {middle:>14.4g} {min(seconds):>8.4g} {max(seconds):>8.4g} {len(seconds):>3} "
            f"{used / middle:>11,.0f}" + (f"   ({preparation}: {preparation_seconds:.1f} s)" if preparation else ""),
            flush=True,
        )
        row: dict[str, object] = {"loading": name, "median": middle, "seconds": seconds, "n": len(seconds)}
        row |= {"preparation": preparation, "preparation_seconds": preparation_seconds}
        rows.append(row | {"images_per_second": used / middle})
    return rows


def main() -> None:
    """Create the images, measure each variant and write the rows as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="folder in which the images are created and kept")
    parser.add_argument("--images", type=int, default=800, help="number of images")
    parser.add_argument("--width", type=int, default=2040, help="width of the images, in pixels")
    parser.add_argument("--height", type=int, default=1356, help="height of the images, in pixels")
    parser.add_argument("--crop", type=int, default=128, help="side length of the crops, in pixels")
    parser.add_argument("--batch-size", type=int, default=128, help="crops per batch")
    parser.add_argument(
        "--workers", default=f"2,{os.cpu_count()}", help="comma-separated worker counts of the plain loader"
    )
    parser.add_argument(
        "--our-workers", type=int, default=2, help="worker processes for decoding, packing and reading the pack"
    )
    parser.add_argument("--epochs", type=int, default=4, help="number of epochs; the median excludes the first")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", default="", help="JSON file for the results, with versions and hardware")
    options = parser.parse_args()
    device, folder = torch.device(options.device), Path(options.folder)
    for split, count in (("train", options.images), ("test", 1)):
        (folder / split).mkdir(parents=True, exist_ok=True)
        make = partial(make_image, folder=folder / split, width=options.width, height=options.height)
        with ProcessPoolExecutor() as processes:
            list(processes.map(make, range(count)))
    mean_size = np.mean([file.stat().st_size for file in (folder / "train").glob("*.png")])
    print(f"{options.images} images of {options.width}×{options.height}, {mean_size / 1e6:.1f} MB each, on {device}")
    rows = measure(options, device)
    if options.json:
        results = {"options": vars(options), "mean_file_bytes": mean_size, "rows": rows}
        Path(options.json).write_text(json.dumps(results | {"provenance": versions_and_hardware()}, indent=1))


if __name__ == "__main__":
    main()
