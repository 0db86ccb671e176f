"""Measure how much tf32, bf16 and fp16 change the results of every network, on a scale from 0 to 255.

Each network processes the same images, or the same noise, in fp32 and in the other precisions: the networks of the
recipes with random weights and, with `--train`, after short training; the networks of spandrel, if it is installed;
and the runs and weights files given on the command line. Values are compared before they are rounded to levels.
A precision that the device does not support is left out. Results are written after each network.

    PYTHONPATH=src python benchmarks/precision_levels.py --json precision_levels.json
    PYTHONPATH=src python benchmarks/precision_levels.py --train 2000 runs/my-run
    PYTHONPATH=src python benchmarks/precision_levels.py --device cpu --px 64 --only super_resolution   # on a CPU
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

LEVELS = 255 / 2  # per unit of the value range [-1, 1]
PRECISIONS = ("tf32", "bf16", "fp16")
NUM_IMAGES, NUM_GENERATED = 2, 64
PANELS = ("hematoxylin", "dapi", "lap2", "marker", "segmentation")
SAMPLED_VALUES = 2_000_000  # for the 99.9th percentile


@dataclass(frozen=True)
class Network:
    """A recipe with settings, and the data that it is built for."""

    name: str
    recipe: str
    settings: tuple[str, ...] = ()
    size: int = 96  # of the training images
    panels: tuple[str, ...] = ()
    quick: bool = False  # whether `--train` also trains it, with the preset `quick`


OWN = (
    Network("SRResNet ×4", "super_resolution", ("scale=4",), quick=True),
    Network("SRResNet ×4, no normalisation", "super_resolution", ("scale=4", "norm=none")),
    Network("SRResNet ×4 of SRGAN (tanh)", "super_resolution", ("scale=4", "output=tanh")),
    Network("RRDBNet ×4", "esrgan", ("scale=4",)),
    Network("U-Net restorer", "restoration", ("network=unet",), quick=True),
    Network("residual restorer", "restoration", ("network=residual",)),
    Network("pix2pix, U-Net", "translation", ("model=pix2pix",), 256, ("target",)),
    Network("DeepLIIF", "translation", ("norm=batch",), 256, PANELS),
    Network("DeepLIIF, instance norm", "translation", ("norm=instance",), 256, PANELS),
    Network("DCGAN", "dcgan", (), 32, quick=True),
    Network("dual GAN", "dual_gan", (), 32, quick=True),
    Network("R3GAN", "r3gan", (), 32),
)
SPANDREL = (
    Network("spandrel RCAN ×4", "super_resolution", ("scale=4", "network=spandrel:RCAN")),
    Network("spandrel SwinIR ×4", "super_resolution", ("scale=4", "network=spandrel:SwinIR")),
    Network("spandrel SPAN ×4", "super_resolution", ("scale=4", "network=spandrel:SPAN")),
    Network("spandrel NAFNet", "restoration", ("network=spandrel:NAFNet",)),
)


def photographs(side: int) -> Tensor:
    """Return crops of the bundled photographs, in [-1, 1]."""
    from paceline.data.bundled import FOLDER
    from paceline.images.decode import decode

    crops = []
    for name in ("astronaut.webp", "ihc.webp")[:NUM_IMAGES]:
        photo: Image.Image = decode(FOLDER / name).convert("RGB")
        left, top = (photo.width - side) // 2, (photo.height - side) // 2
        crops.append(np.asarray(photo.crop((left, top, left + side, top + side))))
    return torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2).float() / 127.5 - 1


def built(network: Network) -> Any:
    """Return a network's recipe with random weights."""
    from paceline.commands.configure import configure
    from paceline.contracts.recipe import DataSpec
    from paceline.inference.trained import build

    torch.manual_seed(0)
    config = configure(network.recipe, {}, assignments=list(network.settings), elsewhere=True)
    return build(config, DataSpec(3, network.size, network.size, panels=network.panels))


def stored(path: str) -> Any:
    """Return the recipe of a run or a weights file, with its trained weights."""
    from paceline.inference.trained import open_trained, read_stored

    return open_trained(read_stored(path), path).recipe


def quickly_trained(network: Network, images: int, folder: str) -> Any:
    """Return the recipe of a run with the preset `quick`."""
    import paceline

    out = f"{folder}/{network.recipe}"
    paceline.train(network.recipe, preset="quick", images=images, out=out)
    return stored(out)


def predicted(recipe: Any, images: Tensor, precision: str) -> Tensor:
    """Return all values of a recipe's results in one precision."""
    from paceline.data.stream import Drawer
    from paceline.inference.trained import uses_of
    from paceline.parallel.precision import choose_precision

    chosen = choose_precision(precision, images.device)
    with torch.no_grad(), chosen.applied(deterministic=False), chosen.autocast():
        if "apply" in uses_of(type(recipe)):
            made = recipe.image_to_image(images[:, : recipe_channels(recipe, images)])
        else:
            draws = Drawer(recipe.draws, 0, images.device, torch.float32).rows("levels", 0, NUM_GENERATED)
            made = {"image": recipe.predict(draws)["image"]}
    return torch.cat([one.float().clamp(-1, 1).flatten() for one in made.values()])


def recipe_channels(recipe: Any, images: Tensor) -> int:
    """Return the number of channels of a network: that of its first convolution, if it is grey, otherwise 3."""
    first = next(one for one in recipe.parameters() if one.ndim == 4)
    return 1 if first.shape[1] == 1 else images.shape[1]


def differences(recipe: Any, images: Tensor) -> dict[str, dict[str, float] | str]:
    """Return the largest, the 99.9th percentile and the mean difference from fp32, by precision."""
    recipe = recipe.to(images.device).eval()
    exact = predicted(recipe, images, "fp32")
    found: dict[str, dict[str, float] | str] = {}
    for precision in PRECISIONS:
        if precision == "tf32" and images.device.type != "cuda":
            continue
        try:
            off = (predicted(recipe, images, precision) - exact).abs() * LEVELS
        except RuntimeError as error:
            found[precision] = f"not supported: {str(error).splitlines()[0][:80]}"
            continue
        sample = off[:: max(1, off.numel() // SAMPLED_VALUES)]
        rank = int(0.999 * (sample.numel() - 1)) + 1
        found[precision] = {
            "largest": off.max().item(),
            "p99.9": sample.kthvalue(rank).values.item(),
            "mean": off.mean().item(),
            "finite": bool(off.isfinite().all()),
        }
    return found


def networks(arguments: argparse.Namespace, folder: str) -> Iterator[tuple[str, Any]]:
    """Yield the name and a function that makes the recipe of every network."""
    listed = [*OWN, *(SPANDREL if find_spec("spandrel") else ())]
    for network in listed:
        if arguments.only in ("", network.recipe):
            yield f"{network.name}, random weights", lambda network=network: built(network)
    for network in listed if arguments.train else ():
        if network.quick and arguments.only in ("", network.recipe):
            name = f"{network.recipe} quick, {arguments.train:,} images"
            yield name, lambda network=network: quickly_trained(network, arguments.train, folder)
    for path in arguments.runs:
        yield path, lambda path=path: stored(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", help="run folders or weights files to measure as well")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--px", type=int, default=256, help="side of the images")
    parser.add_argument("--only", default="", help="measure only the networks of this recipe")
    parser.add_argument("--train", type=int, default=0, help="also train the quick presets on this number of images")
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    device, began = torch.device(arguments.device), time.perf_counter()
    images = photographs(arguments.px).to(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    content: dict[str, Any] = {"device": name, "torch": torch.__version__, "px": arguments.px, "networks": {}}
    print(f"{name}, torch {torch.__version__}: largest / 99.9 % / mean difference from fp32, on a scale of 0 to 255")
    with tempfile.TemporaryDirectory() as folder:
        for title, make in networks(arguments, folder):
            try:
                found = differences(make(), images)
            except Exception as error:  # one network must not end the measurement
                found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
            content["networks"][title] = found
            content["seconds"] = time.perf_counter() - began
            texts = [
                f"{precision} {one}"
                if isinstance(one, str)
                else f"{precision} {one['largest']:.3g} / {one['p99.9']:.3g} / {one['mean']:.3g}"
                for precision, one in found.items()
            ]
            print(f"{title}: {'; '.join(texts)} ({content['seconds']:.0f} s)", flush=True)
            if arguments.json:
                Path(arguments.json).write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
