"""Measure how fast `paceline apply` processes a whole slide, and how much of the time the GPU computes.

The script creates the slide: a tiled, deflate-compressed TIFF of repeated photographs. With `--networks deepliif`, the
networks are DeepLIIF's (four modalities and a segmentation, nine generators) with random weights, and all five results
are written as pyramids. With `--networks small`, a small restoration network is used.

    PYTHONPATH=src python benchmarks/slide_speed.py --side 20000 --json slide_speed.json
    PYTHONPATH=src python benchmarks/slide_speed.py --side 3000 --networks small --device cpu   # on a CPU
    PYTHONPATH=src python benchmarks/slide_speed.py --side 512 --ngf 1 --warm-px 512 --device cpu   # DeepLIIF, on a CPU
    PYTHONPATH=src python benchmarks/slide_speed.py --side 60000 --networks small --device cpu --region 0,0,60000,6000
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np
from apply_speed import BusyShare
from PIL import Image

TILE_PX, PATTERN_TILES = 512, 4
DEEPLIIF = ["generator=resnet_9", "segmentation_generator=unet_512", "norm=batch", "padding=zero"]
SMALL = ["network=residual", "width=8", "num_blocks=2"]
MODALITIES = ("hematoxylin", "dapi", "lap2", "marker", "segmentation")


def make_slide(path: Path, side: int) -> None:
    """Write a slide whose tiles repeat, so that even a huge one is written in seconds."""
    from paceline.data.bundled import FOLDER
    from paceline.images.decode import decode
    from paceline.images.pyramid_file import (
        HEADER_BYTES,
        LONG,
        LONG8,
        SHORT,
        Part,
        PyramidFormat,
        Tags,
        encode_directory,
        encode_header,
    )

    form = PyramidFormat(side, side, 3, "uint8", TILE_PX)
    photo = (
        decode(sorted(FOLDER.glob("*.webp"))[0])
        .convert("RGB")
        .resize((TILE_PX * PATTERN_TILES,) * 2, Image.Resampling.BICUBIC)
    )
    pattern = np.asarray(photo)
    parts, content = [], b"\0" * HEADER_BYTES
    for row, column in np.ndindex(PATTERN_TILES, PATTERN_TILES):
        tile = pattern[row * TILE_PX : (row + 1) * TILE_PX, column * TILE_PX : (column + 1) * TILE_PX]
        stored = zlib.compress(tile.tobytes(), 6)
        parts.append(Part(len(content), len(stored), 0))
        content += stored
    content += b"\0" * (-len(content) % 8)
    down, across = form.grid(0)
    used = [
        parts[row % PATTERN_TILES * PATTERN_TILES + column % PATTERN_TILES] for row, column in np.ndindex(down, across)
    ]
    directory: Tags = {
        256: (LONG, [side]),
        257: (LONG, [side]),
        258: (SHORT, [8, 8, 8]),
        259: (SHORT, [8]),
        262: (SHORT, [2]),
        277: (SHORT, [3]),
        284: (SHORT, [1]),
        322: (LONG, [TILE_PX]),
        323: (LONG, [TILE_PX]),
        324: (LONG8, [part.offset for part in used]),
        325: (LONG8, [part.length for part in used]),
    }
    path.write_bytes(encode_header(len(content)) + content[HEADER_BYTES:] + encode_directory(directory, len(content)))


def make_weights(path: Path, networks: str, ngf: int = 64) -> None:
    from paceline.commands.configure import configure
    from paceline.contracts.recipe import DataSpec
    from paceline.inference.trained import build
    from paceline.runs.weights import write_weights

    recipe, settings, panels = (
        ("translation", [*DEEPLIIF, f"ngf={ngf}"], MODALITIES) if networks == "deepliif" else ("restoration", SMALL, ())
    )
    config = configure(recipe, {}, assignments=settings, elsewhere=True)
    spec = DataSpec(3, 512, 512, panels=panels)
    write_weights(path, config, spec, build(config, spec).state_dict())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", type=int, default=20_000)
    parser.add_argument("--networks", choices=("deepliif", "small"), default="deepliif")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--region", default="")
    parser.add_argument("--tile", default="0")
    parser.add_argument("--ngf", type=int, default=64, help="width of DeepLIIF's generators")
    parser.add_argument("--warm-px", type=int, default=1024, help="side of the region that is processed first")
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    from paceline.cli.app import run

    work = Path(tempfile.mkdtemp(prefix="slide_speed"))
    make_slide(work / "slide.tif", arguments.side)
    make_weights(work / "weights.safetensors", arguments.networks, arguments.ngf)
    words = ["apply", str(work / "weights.safetensors"), str(work / "slide.tif"), "--accelerator", arguments.device]
    words += ["--precision", arguments.precision if arguments.device == "cuda" else "fp32", "--tile", arguments.tile]
    width, height = map(int, arguments.region.split(",")[2:]) if arguments.region else (arguments.side,) * 2
    warm = min(arguments.side, arguments.warm_px)
    if run([*words, "--out", str(work / "warm"), "--region", f"0,0,{warm},{warm}"]):
        raise SystemExit("the first region failed")
    busy, start = BusyShare(), time.perf_counter()
    code = run(
        [*words, "--out", str(work / "out"), *(["--region", arguments.region] if arguments.region else ["--preview"])]
    )
    seconds = time.perf_counter() - start
    result = {
        "megapixels": width * height / 1e6,
        "seconds": seconds,
        "megapixels_per_second": width * height / 1e6 / seconds,
        "gpu_busy": busy.stop(),
        "peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "exit_code": code,
        "files": {path.name: path.stat().st_size for path in sorted((work / "out").iterdir())},
        **vars(arguments),
    }
    print(json.dumps(result, indent=1))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1))
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
