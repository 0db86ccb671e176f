"""Measure how fast the second-order degradation of Real-ESRGAN is on the device, compared with CPU workers.

The workers of torch's DataLoader degrade one image at a time with Pillow (resizing, JPEG) and NumPy (blur by FFT,
noise), with parameters from the same distributions; their images then travel to the device. The device variants degrade
whole batches: eager, and as one CUDA graph. All variants start from the same crops in memory, so decoding is not
included. Blocks of the variants are interleaved.

    PYTHONPATH=src python benchmarks/degradation_speed.py --workers 16 --json degradation_speed.json
    PYTHONPATH=src python benchmarks/degradation_speed.py --workers 2 --batch 4 --crop 64 --seconds 1   # on a CPU
"""

from __future__ import annotations

import argparse
from io import BytesIO

import numpy as np
import torch
from _variants import Variant, endless, measure_interleaved, print_rows, set_torch_defaults, write_results
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from paceline.data.bundled import FOLDER
from paceline.images.decode import decode
from paceline.images.degradation.kernels import random_blur_kernels, random_sinc_kernels
from paceline.images.degradation.numbers import Numbers
from paceline.images.degradation.second_order import FINAL_SINC_PROBABILITY, FIRST, NUM_NUMBERS, SECOND, Round, degrade

SCALE = 4
FILTERS = (Image.Resampling.BOX, Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)
PHOTOGRAPHS = ("astronaut.webp", "coffee.webp", "chelsea.webp", "motorcycle_left.webp")
Pixels = NDArray[np.float32]


class Degraded(Dataset[Tensor]):
    """Crops that are degraded on the CPU, one at a time, as in a plain training script."""

    def __init__(self, crops: NDArray[np.uint8], length: int) -> None:
        self.crops, self.length = crops, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        chance = np.random.default_rng(index)
        height, width = self.crops.shape[1:3]
        image = self.crops[index % len(self.crops)].astype(np.float32)
        image = degrade_once(image, chance, FIRST, height, width)
        image = degrade_once(image, chance, SECOND, height // SCALE, width // SCALE)
        kernel = random_sinc_kernels(numbers(chance), FINAL_SINC_PROBABILITY)[0].numpy()
        jpeg_first = chance.random() < 0.5
        image = compress(image, chance, SECOND) if jpeg_first else image
        image = blur(resize(image, chance, height // SCALE, width // SCALE), kernel)
        image = image if jpeg_first else compress(image, chance, SECOND)
        return torch.from_numpy(image.round().clip(0, 255).astype(np.uint8))


def numbers(chance: np.random.Generator) -> Numbers:
    """Return random numbers for the kernels of one image; kernels cost little next to the filtering."""
    return Numbers(torch.from_numpy(chance.random((1, 16), dtype=np.float32)))


def degrade_once(image: Pixels, chance: np.random.Generator, settings: Round, height: int, width: int) -> Pixels:
    """Blur, resize, add noise and compress."""
    kernel = random_blur_kernels(
        numbers(chance), settings.blur_probability, settings.sinc_probability, settings.max_blur_sigma
    )
    image = blur(image, kernel[0].numpy())
    direction, scale = chance.random(), 1.0
    if direction < settings.up_probability:
        scale = chance.uniform(1, settings.largest_scale)
    elif direction >= 1 - settings.down_probability:
        scale = chance.uniform(settings.smallest_scale, 1)
    image = resize(image, chance, max(1, int(height * scale)), max(1, int(width * scale)))
    shape = (*image.shape[:2], 1 if chance.random() < 0.4 else 3)
    if chance.random() < 0.5:
        sigma = chance.uniform(1, settings.max_noise_sigma)
        image = image + np.float32(sigma) * chance.standard_normal(shape, dtype=np.float32)
    else:
        mean = image.mean(axis=-1, keepdims=True) if shape[-1] == 1 else image
        mean = mean.clip(0, 255)
        image = image + np.float32(chance.uniform(0.05, settings.max_poisson)) * (chance.poisson(mean) - mean)
    return compress(image, chance, settings)


def blur(image: Pixels, kernel: Pixels) -> Pixels:
    """Filter an image with NumPy's FFT, reflecting it at the border; much faster than a sum over 441 positions."""
    side = kernel.shape[0]
    margin = side // 2
    padded = np.pad(image, ((margin, margin), (margin, margin), (0, 0)), mode="symmetric")
    size = padded.shape[:2]
    product = np.fft.rfft2(padded, axes=(0, 1)) * np.fft.rfft2(kernel, size)[..., np.newaxis]
    filtered = np.fft.irfft2(product, size, axes=(0, 1))
    return filtered[side - 1 :, side - 1 :].astype(np.float32)


def resize(image: Pixels, chance: np.random.Generator, height: int, width: int) -> Pixels:
    """Resize with one of Pillow's filters."""
    chosen = FILTERS[chance.integers(len(FILTERS))]
    return np.array(to_pillow(image).resize((width, height), chosen), dtype=np.float32)


def compress(image: Pixels, chance: np.random.Generator, settings: Round) -> Pixels:
    """Compress and decompress with Pillow."""
    buffer = BytesIO()
    low, high = settings.jpeg_quality
    to_pillow(image).save(buffer, "JPEG", quality=int(chance.integers(low, high + 1)))
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


def device_variants(crops: NDArray[np.uint8], batch: int, device: torch.device) -> list[Variant]:
    """Return the variants that degrade on the device: eager and, on a GPU, as a CUDA graph."""
    stored = torch.from_numpy(crops).permute(0, 3, 1, 2).to(device)
    generator = torch.Generator(device).manual_seed(0)
    chosen = torch.zeros(batch, dtype=torch.int64, device=device)
    uniforms = torch.zeros(batch, NUM_NUMBERS, device=device)

    def degrade_batch() -> Tensor:
        return degrade(stored[chosen].float() / 127.5 - 1, uniforms, SCALE)

    def draw() -> None:
        chosen.random_(0, len(stored), generator=generator)
        uniforms.uniform_(0, 1, generator=generator)

    def eager() -> None:
        draw()
        degrade_batch()

    variants = [Variant(f"{device.type}, eager", eager, before=set_torch_defaults)]
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

        variants.append(Variant("cuda, one CUDA graph", replay, before=set_torch_defaults))
    return variants


def main() -> None:
    """Measure all variants interleaved, print a table and write the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=16, help="processes that degrade on the CPU (default: 16)")
    parser.add_argument("--batch", type=int, default=48, help="images per batch (default: 48)")
    parser.add_argument("--crop", type=int, default=256, help="side of the crops in pixels (default: 256)")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of a block (default: 10)")
    parser.add_argument("--repeats", type=int, default=5, help="blocks per variant (default: 5)")
    parser.add_argument("--json", default="", help="JSON file for the results, with versions and hardware")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    crops = load_crops(options.crop)
    loader = DataLoader(
        Degraded(crops, 10**7),
        options.batch,
        num_workers=options.workers,
        pin_memory=device.type == "cuda",
        worker_init_fn=lambda _: torch.set_num_threads(1),
    )
    batches = endless(loader)

    def fetch() -> None:
        next(batches).to(device, non_blocking=True)

    variants = [Variant(f"{options.workers} CPU workers", fetch, warmup=2 * options.workers)]
    variants += device_variants(crops, options.batch, device)
    title = f"second-order degradation, {options.crop} px crops, ×{SCALE}, batch {options.batch}, {device}"
    rows = measure_interleaved(
        variants,
        options.batch,
        options.seconds,
        options.repeats,
        device,
        lambda found: write_results(options.json, options, rows=found),
    )
    print_rows(title, rows)


if __name__ == "__main__":
    main()
