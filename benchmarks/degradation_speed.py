"""Measure how fast the second-order degradation of Real-ESRGAN is on the device, compared with CPU workers.

The workers of torch's DataLoader degrade one image at a time with Pillow (resizing, JPEG) and NumPy (blur by FFT,
noise). Their images are then copied to the device. The device variants degrade whole batches: eager, and as one CUDA
graph. On a GPU, they use Triton kernels; `--torch` adds PyTorch's own operations, which other devices use.
Both sides start from the same crops in memory, so decoding is not included. Both compute the same steps with the same
parameters, from the same table of random numbers. Before the measurement, the images of both sides without noise are
compared, and their mean difference is printed. It is not zero, because Pillow's filters adapt to the scale when they
shrink an image and those on the device do not.

The sides take turns. The workers run during their own turns only. A turn starts when the batches that the workers
prepared in advance have been fetched.

    PYTHONPATH=src python benchmarks/degradation_speed.py --workers 16 --json degradation_speed.json
    PYTHONPATH=src python benchmarks/degradation_speed.py --workers 16 --torch   # about 30 seconds longer
    PYTHONPATH=src python benchmarks/degradation_speed.py --workers 2 --batch 4 --crop 64 --seconds 1   # on a CPU
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from io import BytesIO

import numpy as np
import torch
from _variants import Variant, measure_interleaved, print_rows, set_torch_defaults, write_results
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from paceline.contracts.data_spec import LUMA
from paceline.data.bundled import FOLDER
from paceline.images.decode import decode
from paceline.images.degradation import operations, second_order
from paceline.images.degradation.operations import Numbers, normalised, random_blur_kernels, random_sinc_kernels
from paceline.images.degradation.second_order import (
    FINAL_SINC_PROBABILITY,
    FIRST,
    NUM_NUMBERS,
    NUM_ORDER_NUMBERS,
    NUM_RESIZE_NUMBERS,
    ORDERS,
    SECOND,
    Round,
    Steps,
    degrade,
    fastest_steps,
)

SCALE = 4
NUM_SAMPLES = 10**7  # more than the workers can load
NUM_COMPARED = 16  # images
TABLE_ROWS = 4096  # rows of random numbers, used in turn
STEPS_PER_TURN = {"Triton": 200, "PyTorch": 20}  # on a GPU, which needs shorter turns than the workers
FIXED_ORDER = "blur resize noise"
FILTERS = (Image.Resampling.BOX, Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)
PHOTOGRAPHS = ("astronaut.webp", "coffee.webp", "chelsea.webp", "motorcycle_left.webp")
Pixels = NDArray[np.float32]
Rounds = tuple[Round, Round]


class Table:
    """Random numbers of TABLE_ROWS samples, for both sides; without orders if the order of the steps is fixed."""

    def __init__(self, order: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.uniforms = torch.rand(TABLE_ROWS, NUM_NUMBERS, generator=generator)
        self.orders = torch.rand(TABLE_ROWS, NUM_ORDER_NUMBERS, generator=generator) if order == "random" else None


class Degraded(Dataset[Tensor]):
    """Crops that are degraded on the CPU, one at a time, as in a plain training script."""

    def __init__(self, crops: NDArray[np.uint8], table: Table, rounds: Rounds) -> None:
        self.crops, self.table, self.rounds = crops, table, rounds

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        row = index % TABLE_ROWS
        numbers = Numbers(self.table.uniforms[row : row + 1])
        orders = [FIXED_ORDER] * 2
        if self.table.orders is not None:
            orders = [ORDERS[int(number * len(ORDERS))] for number in self.table.orders[row].tolist()]
        height, width = self.crops.shape[1:3]
        image = self.crops[index % len(self.crops)].astype(np.float32)
        small = (height // SCALE, width // SCALE)
        for settings, order, size in zip(self.rounds, orders, ((height, width), small), strict=True):
            image = degrade_once(image, numbers, settings, order, *size)
        jpeg_first, chosen = scalars(numbers, 2)
        kernel = normalised(random_sinc_kernels(numbers, FINAL_SINC_PROBABILITY))[0].numpy()
        quality = draw_quality(numbers, self.rounds[1])
        image = compress(image, quality) if jpeg_first < 0.5 else image
        image = blur(resize(image, *small, chosen), kernel)
        image = image if jpeg_first < 0.5 else compress(image, quality)
        return torch.from_numpy(image.round().clip(0, 255).astype(np.uint8))


def scalars(numbers: Numbers, count: int) -> list[float]:
    """Return the next random numbers of a table with one row."""
    return [column.item() for column in numbers.take(count)]


def draw_quality(numbers: Numbers, settings: Round) -> int:
    low, high = settings.jpeg_quality
    return low + int(scalars(numbers, 1)[0] * (high - low + 1))


def degrade_once(image: Pixels, numbers: Numbers, settings: Round, order: str, height: int, width: int) -> Pixels:
    """Blur, resize and add noise in the given order, and compress."""
    kernel = random_blur_kernels(numbers, settings.blur_probability, settings.sinc_probability, settings.max_blur_sigma)
    direction, amount, chosen = scalars(numbers, NUM_RESIZE_NUMBERS)
    scale = 1.0
    if direction < settings.up_probability:
        scale = 1 + (settings.largest_scale - 1) * amount
    elif direction >= 1 - settings.down_probability:
        scale = settings.smallest_scale + (1 - settings.smallest_scale) * amount
    noise_numbers = scalars(numbers, operations.NUM_NOISE_NUMBERS)
    for step in order.split():
        if step == "blur":
            image = blur(image, normalised(kernel)[0].numpy())
        elif step == "resize":
            image = resize(image, max(1, int(height * scale)), max(1, int(width * scale)), chosen)
        else:
            image = add_noise(image, noise_numbers, settings)
    return compress(image, draw_quality(numbers, settings))


def add_noise(image: Pixels, numbers: list[float], settings: Round) -> Pixels:
    """Add Gaussian or Poisson noise, in colour or equal in all channels, and clip."""
    kind, strength, grey, seed, other_seed = numbers
    chance = np.random.default_rng((int(seed * 2**24), int(other_seed * 2**24)))
    is_grey = grey < operations.GREY_PROBABILITY
    if kind < operations.GAUSSIAN_PROBABILITY:
        low = min(operations.SMALLEST_NOISE, settings.max_noise_sigma)
        shape = (*image.shape[:2], 1 if is_grey else 3)
        sigma = np.float32(low + (settings.max_noise_sigma - low) * strength)
        image = image + sigma * chance.standard_normal(shape, dtype=np.float32)
    else:
        low = min(operations.SMALLEST_POISSON, settings.max_poisson)
        mean = (image @ np.array(LUMA, np.float32))[..., np.newaxis] if is_grey else image
        mean = mean.clip(0, 255)
        image = image + np.float32(low + (settings.max_poisson - low) * strength) * (chance.poisson(mean) - mean)
    return image.clip(0, 255).astype(np.float32, copy=False)


def blur(image: Pixels, kernel: Pixels) -> Pixels:
    """Filter an image with NumPy's FFT, reflecting it at the border; much faster than a sum over 441 positions."""
    side = kernel.shape[0]
    margin = side // 2
    padded = np.pad(image, ((margin, margin), (margin, margin), (0, 0)), mode="reflect")
    size = padded.shape[:2]
    product = np.fft.rfft2(padded, axes=(0, 1)) * np.fft.rfft2(kernel, size)[..., np.newaxis]
    filtered = np.fft.irfft2(product, size, axes=(0, 1))
    return filtered[side - 1 :, side - 1 :].astype(np.float32)


def resize(image: Pixels, height: int, width: int, chosen: float) -> Pixels:
    """Resize with one of Pillow's filters, selected by a number in [0, 1)."""
    if image.shape[:2] == (height, width):
        return image
    return np.array(to_pillow(image).resize((width, height), FILTERS[int(chosen * len(FILTERS))]), dtype=np.float32)


def compress(image: Pixels, quality: int) -> Pixels:
    """Compress and decompress with Pillow."""
    buffer = BytesIO()
    to_pillow(image).save(buffer, "JPEG", quality=quality)
    return np.array(Image.open(buffer), dtype=np.float32)


def to_pillow(image: Pixels) -> Image.Image:
    return Image.fromarray(image.round().clip(0, 255).astype(np.uint8))


def load_crops(side: int) -> NDArray[np.uint8]:
    """Return 64 square crops of bundled photographs."""
    chance = np.random.default_rng(0)
    images = [np.array(decode(FOLDER / name).convert("RGB")) for name in PHOTOGRAPHS]
    crops = []
    for number in range(64):
        image = images[number % len(images)]
        top, left = (int(chance.integers(length - side + 1)) for length in image.shape[:2])
        crops.append(image[top : top + side, left : left + side])
    return np.stack(crops)


class Workers:
    """A DataLoader whose workers run only between `start` and `stop`."""

    def __init__(self, loader: DataLoader[Tensor], device: torch.device) -> None:
        self.loader, self.device = loader, device
        self.batches: Iterator[Tensor] | None = None

    def start(self) -> None:
        """Start the workers, and fetch the batches that they prepare in advance."""
        self.stop()
        self.batches = iter(self.loader)
        for _ in range(self.loader.num_workers * (self.loader.prefetch_factor or 1)):
            next(self.batches)

    def stop(self) -> None:
        """End the workers, which the iterator owns."""
        self.batches = None
        set_torch_defaults()

    def fetch(self) -> None:
        """Copy the next batch to the device."""
        assert self.batches is not None
        next(self.batches).to(self.device, non_blocking=True)


def device_variants(
    crops: NDArray[np.uint8], table: Table, batch: int, device: torch.device, workers: Workers, steps: Steps
) -> list[Variant]:
    """Return the variants that degrade on the device: eager and, on a GPU, as a CUDA graph."""
    kind = "PyTorch" if steps is second_order.TORCH_STEPS else "Triton"
    stored = torch.from_numpy(crops).permute(0, 3, 1, 2).to(device)
    generator = torch.Generator(device).manual_seed(0)
    chosen, rows = (torch.zeros(batch, dtype=torch.int64, device=device) for _ in range(2))
    uniforms = table.uniforms.to(device)
    orders = None if table.orders is None else table.orders.to(device)

    def degrade_batch() -> Tensor:
        images = stored[chosen].float() / 127.5 - 1
        chosen_orders = None if orders is None else orders[rows]
        return degrade(images, uniforms[rows], SCALE, orders=chosen_orders, steps=steps)

    def draw() -> None:
        chosen.random_(0, len(stored), generator=generator)
        rows.random_(0, TABLE_ROWS, generator=generator)

    def eager() -> None:
        draw()
        degrade_batch()

    length = STEPS_PER_TURN[kind] if device.type == "cuda" else 0
    variants = [Variant(f"{device.type}, {kind}, eager", eager, before=workers.stop, length=length)]
    if device.type == "cuda":
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                eager()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            degrade_batch()

        def replay() -> None:
            draw()
            graph.replay()

        variants.append(Variant(f"cuda, {kind}, one CUDA graph", replay, before=workers.stop, length=length))
    return variants


def difference_in_levels(crops: NDArray[np.uint8], table: Table, device: torch.device) -> float:
    """Return the mean difference between the two sides' images without noise."""
    first, second = (dataclasses.replace(one, max_noise_sigma=0.0, max_poisson=0.0) for one in (FIRST, SECOND))
    ours = Degraded(crops, table, (first, second))
    theirs = torch.from_numpy(crops[:NUM_COMPARED]).permute(0, 3, 1, 2).to(device).float() / 127.5 - 1
    orders = None if table.orders is None else table.orders[:NUM_COMPARED].to(device)
    made = degrade(theirs, table.uniforms[:NUM_COMPARED].to(device), SCALE, first, second, orders)
    levels = ((made + 1) * 127.5).permute(0, 2, 3, 1).cpu()
    return float(np.mean([(levels[number] - ours[number]).abs().mean() for number in range(NUM_COMPARED)]))


def main() -> None:
    """Measure both sides in turns, print a table and write the results as JSON after every turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=16, help="processes that degrade on the CPU (default: 16)")
    parser.add_argument("--batch", type=int, default=48, help="images per batch (default: 48)")
    parser.add_argument("--crop", type=int, default=256, help="side of the crops in pixels (default: 256)")
    parser.add_argument("--order", choices=("random", "fixed"), default="random", help="order of a round's steps")
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of the workers' turns (default: 4)")
    parser.add_argument("--repeats", type=int, default=5, help="turns per variant (default: 5)")
    parser.add_argument("--torch", action="store_true", help="measure PyTorch's own operations on the GPU, too")
    parser.add_argument("--json", default="", help="JSON file for the results, with versions and hardware")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    crops, table = load_crops(options.crop), Table(options.order)
    difference = difference_in_levels(crops, table, device)
    print(f"mean difference between the two sides without noise: {difference:.2f} levels of 255", flush=True)
    loader = DataLoader(
        Degraded(crops, table, (FIRST, SECOND)),
        options.batch,
        num_workers=options.workers,
        pin_memory=device.type == "cuda",
        worker_init_fn=lambda _: torch.set_num_threads(1),
    )
    workers = Workers(loader, device)
    variants = [Variant(f"{options.workers} CPU workers", workers.fetch, workers.start, workers.stop)]
    fastest = fastest_steps(torch.empty(0, device=device))
    for steps in [fastest] + [second_order.TORCH_STEPS] * (options.torch and fastest is not second_order.TORCH_STEPS):
        variants += device_variants(crops, table, options.batch, device, workers, steps)
    title = f"degradation in {options.order} order, {options.crop} px crops, ×{SCALE}, batch {options.batch}, {device}"
    rows = measure_interleaved(
        variants,
        options.batch,
        options.seconds,
        options.repeats,
        device,
        lambda found: write_results(options.json, options, rows=found, difference_in_levels=difference),
    )
    print_rows(title, rows)


if __name__ == "__main__":
    main()
