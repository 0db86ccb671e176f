"""Apply a network to a huge TIFF, kill the command several times, resume it, and check regions of the result.

The script creates the slide (see slide_speed.py) and starts `paceline apply` in a process of its own. It kills the
process (SIGKILL) at random moments and starts the same command again. If `--minutes` have passed before the result is
complete, the last process is also killed, and the total time is extrapolated. Finished regions are then compared with a
forward pass of the network on the same region and its halo, in one piece. With `--reference`, a second command without
interruptions must write the same bytes; this takes as long again. Results are written after each part.

    PYTHONPATH=src python benchmarks/whole_slide.py --side 60000 --minutes 60 --json whole_slide.json
    PYTHONPATH=src python benchmarks/whole_slide.py --side 3000 --regions 3 --region-px 256 --reference   # small
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _resident_memory import peak_resident_bytes
from slide_speed import make_slide, make_weights

POLL_S = 0.05


def start(work: Path, out: str, arguments: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start `paceline apply` in the background."""
    words = ["apply", str(work / "weights.safetensors"), str(work / "slide.tif"), "--out", str(work / out)]
    words += ["--accelerator", arguments.device, "--precision", arguments.precision, "--tile", str(arguments.tile)]
    words += ["--region", f"0,0,{arguments.side},{arguments.side}"]  # so that a small slide is also read by region
    log = (work / f"{out}.log").open("ab")
    return subprocess.Popen([sys.executable, "-m", "paceline", *words], stdout=log, stderr=log)


def journal_bytes(work: Path, out: str) -> int:
    """Return the size of the journal of an unfinished result."""
    files = list((work / out).glob(".*.journal")) if (work / out).is_dir() else []
    return sum(file.stat().st_size for file in files)


class Watch:
    """Runs the command, and records what it does."""

    def __init__(self, work: Path, out: str, arguments: argparse.Namespace) -> None:
        self.work, self.out, self.arguments = work, out, arguments
        self.peak, self.seconds, self.kills = 0.0, 0.0, 0

    def run(self, ends: Callable[[float], bool]) -> int | None:
        """Run the command until it ends, and return its exit code; kill it if `ends(seconds)`, and return None."""
        process, began = start(self.work, self.out, self.arguments), time.perf_counter()
        try:
            while process.poll() is None:
                self.peak = max(self.peak, peak_resident_bytes(process.pid) / 1e9)
                if ends(time.perf_counter() - began):
                    process.kill()
                    process.wait()
                    self.kills += 1
                    return None
                time.sleep(POLL_S)
            return process.returncode
        finally:
            self.seconds += time.perf_counter() - began
            if process.poll() is None:
                process.kill()
                process.wait()


@contextmanager
def open_result(work: Path, out: str, side: int) -> Iterator[tuple[Callable[[int, int, int], Any] | None, int]]:
    """Yield a function that reads a square of the result, and the number of rows that are finished."""
    from paceline.images.rectangles import Box
    from paceline.images.regions.open_image import open_region_image
    from paceline.images.regions.pyramid_file import Place, PyramidFile, PyramidFormat, partial_files, purpose_of
    from paceline.inference.apply_regions import tiff_tile_px
    from paceline.inference.tiles import Tiling, plan_tiles

    target = work / out / "slide.tif"
    if target.is_file():
        with open_region_image(target) as image:
            yield lambda top, left, px: image.read(0, Box(top, left, px, px)), side
        return
    purpose = purpose_of(partial_files(target)[1])
    if purpose is None:
        yield None, 0
        return
    tiling = Tiling(**purpose["tiling"])  # type: ignore[arg-type]
    form = PyramidFormat(side, side, 3, "uint8", tiff_tile_px(tiling.side_px, 1))
    blocks = plan_tiles(tiling, (side, side))
    with closing(PyramidFile(target, form, (block.own for block in blocks), purpose)) as file:

        def read(top: int, left: int, px: int) -> Any:
            step, rows = form.tile_px, []
            for row in range(top // step, (top + px - 1) // step + 1):
                columns = range(left // step, (left + px - 1) // step + 1)
                rows.append(np.concatenate([file.tile(Place(0, row, column)) for column in columns], axis=1))
            return np.concatenate(rows)[top % step :][:px, left % step :][:, :px]

        yield read, min(side, file.num_blocks_done // -(-side // tiling.side_px) * tiling.side_px)


def check_regions(work: Path, out: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare random regions of the result with a forward pass on each region and its halo."""
    from paceline.contracts.data_spec import EIGHT_BITS
    from paceline.data.stream import to_pixels
    from paceline.images.rectangles import Box
    from paceline.images.regions.open_image import open_region_image
    from paceline.inference.runner import tensor_of, to_unit_range, transform
    from paceline.inference.trained import open_image_model

    side, px = arguments.side, arguments.region_px
    model = open_image_model(str(work / "weights.safetensors"))
    field = model.receptive_field
    multiple = field.multiple_px
    model.recipe.to(arguments.device)
    chosen, largest, differing = random.Random(arguments.seed), 0, 0
    with open_result(work, out, side) as (read, rows), open_region_image(work / "slide.tif") as slide:
        if read is None or rows < px:
            return {"regions": 0}
        for _ in range(arguments.regions):
            top, left = chosen.randint(0, rows - px), chosen.randint(0, side - px)
            first = [max(0, (one - field.tiled_halo_px) // multiple * multiple) for one in (top, left)]
            last = [min(side, -(-(one + px + field.tiled_halo_px) // multiple) * multiple) for one in (top, left)]
            pixels = slide.read(0, Box(first[0], first[1], last[0] - first[0], last[1] - first[1]))
            with torch.no_grad():
                images = to_unit_range(tensor_of(pixels).to(arguments.device), EIGHT_BITS)
                values = transform(model, images).by_name["image"]
                whole = to_pixels(values, EIGHT_BITS)[0].cpu().numpy()
            expected = whole[top - first[0] :, left - first[1] :][:px, :px].astype(int)
            off = np.abs(read(top, left, px).astype(int) - expected)
            largest, differing = max(largest, int(off.max())), differing + int((off > 0).sum())
    return {"regions": arguments.regions, "px": px, "largest_difference": largest, "values_that_differ": differing}


def digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while content := file.read(1 << 24):
            found.update(content)
    return found.hexdigest()


class Interruption:
    """Ends a process some time after it has finished its first tile, or when the time is over."""

    def __init__(self, work: Path, time_left: float, pause: float) -> None:
        self.work, self.time_left, self.pause = work, time_left, pause
        self.before, self.moved = journal_bytes(work, "out"), float("inf")

    def __call__(self, seconds: float) -> bool:
        if journal_bytes(self.work, "out") > self.before:
            self.moved = min(self.moved, seconds)
        return seconds > min(self.time_left, self.moved + self.pause)


def measure(work: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"arguments": vars(arguments)}

    def report(**found: Any) -> None:
        result.update(found)
        print(json.dumps(found), flush=True)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(result, indent=1))

    limit = arguments.minutes * 60
    watch, chosen = Watch(work, "out", arguments), random.Random(arguments.seed)
    code: int | None = None
    while code is None and watch.seconds < limit:
        pause = chosen.uniform(*map(float, arguments.pause.split(",")))
        if watch.kills >= arguments.kills:
            pause = float("inf")
        code = watch.run(Interruption(work, limit - watch.seconds, pause))
        with open_result(work, "out", arguments.side) as (_, rows):
            report(seconds=watch.seconds, kills=watch.kills, exit_code=code, rows=rows, peak_rss_gb=watch.peak)
    share = result["rows"] / arguments.side
    if share:
        report(
            share=share,
            megapixels_per_second=arguments.side**2 * share / 1e6 / watch.seconds,
            extrapolated_minutes=watch.seconds / share / 60,
        )
    report(check=check_regions(work, "out", arguments))
    if arguments.reference and code == 0:
        whole = Watch(work, "whole", arguments)
        again = whole.run(lambda seconds: False)
        equal = digest(work / "out/slide.tif") == digest(work / "whole/slide.tif")
        report(reference={"exit_code": again, "seconds": whole.seconds, "same_bytes": equal, "peak_gb": whole.peak})
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", type=int, default=60_000)
    parser.add_argument("--minutes", type=float, default=10, help="stop after this time, start-ups included")
    parser.add_argument("--networks", choices=("small",), default="small")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--tile", type=int, default=0)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--pause", default="1,10", help="shortest and longest time from progress to a kill, in seconds")
    parser.add_argument("--regions", type=int, default=10)
    parser.add_argument("--region-px", type=int, default=1024)
    parser.add_argument("--reference", action="store_true", help="also run without interruptions and compare bytes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default="")
    parser.add_argument("--work", default="", help="folder for the files; default: a temporary folder")
    arguments = parser.parse_args()
    work = Path(arguments.work or tempfile.mkdtemp(prefix="whole_slide"))
    work.mkdir(parents=True, exist_ok=True)
    try:
        make_slide(work / "slide.tif", arguments.side)
        make_weights(work / "weights.safetensors", arguments.networks)
        result = measure(work, arguments)
    finally:
        if not arguments.work:
            shutil.rmtree(work)
    same = result.get("reference", {}).get("same_bytes", True)
    return 0 if same and result["check"].get("largest_difference", 0) <= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
