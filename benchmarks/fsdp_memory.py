"""Measure the peak memory per process of DeepLIIF under fsdp and ddp, during training and while saving.

The preset `deepliif` has 18 networks with 443 million parameters. The rows (images of six panels) are random. On a
GPU, the value is the peak of the allocated memory. On a CPU, it is the peak of the resident set beyond what the process
used before it built the networks. If the machine has one GPU, `--gpus 0,0` runs two processes on it, over gloo. Smaller
crops need smaller U-Nets for the segmentation, which leaves 254 million parameters at 64 pixels.

    PYTHONPATH=src python benchmarks/fsdp_memory.py --gpus 0,0 --json fsdp_memory.json
    PYTHONPATH=src python benchmarks/fsdp_memory.py --accelerator cpu --crop 64 --steps 2 \\
        --set segmentation_generator=unet_64
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from _variants import write_random_rows, write_results

from paceline.commands.configure import configure
from paceline.config.resolve import Config
from paceline.launch.tasks import Task, run_in_processes
from paceline.training.build import assemble
from paceline.training.resume import take_snapshot

MEBIBYTE = 2**20
VARIANTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp", "checkpoint_activations": "off"},
    "fsdp": {"strategy": "fsdp", "checkpoint_activations": "off"},
    "fsdp, activations recomputed": {"strategy": "fsdp", "checkpoint_activations": "on"},
}


def measure_peak_memory(config: Config, folder: str, steps: int) -> None:
    """Train for some steps and write this process's memory in MiB to FOLDER/RANK.json.

    On a CPU, the memory is the resident set beyond what the process used before the networks were built. It includes
    the batches and the memory that libraries keep for reuse.
    """
    before = resident_mib("VmRSS")
    parts = assemble(config)
    device = parts.world.device
    reset_peak(device)
    parts.recipe.train()
    for data in parts.feed.steps(0, steps * parts.feed.images_per_step):
        parts.step(data)
    training = peak_mib(device, before)
    reset_peak(device)
    snapshot = take_snapshot(0, parts.step, None, -1, {})()
    result = {
        "parameters": sum(parameter.numel() for parameter in parts.recipe.parameters()),
        "training_mib": training,
        "saving_mib": peak_mib(device, before),
        "snapshot_mib": sum(t.nbytes for t in (*snapshot.weights.values(), *snapshot.state.values())) / MEBIBYTE,
        "notes": parts.notes,
    }
    Path(folder, f"{parts.world.rank}.json").write_text(json.dumps(result))
    parts.world.wait_for_all()
    parts.world.leave()


def reset_peak(device: torch.device) -> None:
    """Measure the peak of this process from now on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak_mib(device: torch.device, before: float) -> float:
    """Return the peak of the allocated memory; on a CPU, that of the resident set beyond `before`."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device) / MEBIBYTE)
    return resident_mib("VmHWM") - before


def resident_mib(name: str) -> float:
    """Return a value of this process that Linux reports in /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) / 1024


def measure_variant(name: str, options: argparse.Namespace, rows: Path) -> dict[str, Any]:
    """Return the memory of the process that uses the most."""
    from fsdp_memory import measure_peak_memory  # by this name, the processes import it

    given: dict[str, Any] = {"preset": "deepliif", "data_root": str(rows), "validation": 0, "loader": "resident"}
    given |= {"devices": options.devices, "batch_size": str(options.devices), "crop": options.crop, "graph": "off"}
    given |= {"accelerator": options.accelerator, "gpus": options.gpus, "images": 10**6}
    given |= {"compile": "off"}  # compiled networks store other activations
    config = configure("translation", given | VARIANTS[name], assignments=options.set)
    with tempfile.TemporaryDirectory() as folder:
        code = run_in_processes(Task.of(measure_peak_memory, folder, options.steps), config)
        if code:
            raise SystemExit(code)
        ranks = [json.loads(file.read_text()) for file in sorted(Path(folder).iterdir())]
    most = {key: max(rank[key] for rank in ranks) for key in ("training_mib", "saving_mib", "snapshot_mib")}
    return {"variant": name, "parameters": ranks[0]["parameters"], **most, "notes": ranks[0]["notes"]}


def main() -> None:
    """Measure each variant in new processes, print a table and write the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="number of processes")
    parser.add_argument("--accelerator", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--gpus", default="", help="GPU of each process, e.g. 0,0 for two processes on one GPU")
    parser.add_argument("--crop", type=int, default=512, help="size of the training crops in pixels")
    parser.add_argument("--steps", type=int, default=3, help="training steps")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="setting of the recipe")
    parser.add_argument("--json", default="", help="JSON file for the results, with versions and hardware")
    options = parser.parse_args()
    # The processes import the function that they run from this folder.
    paths = (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with tempfile.TemporaryDirectory() as folder:
        write_random_rows(Path(folder), options.crop)
        results = [measure_variant(name, options, Path(folder)) for name in VARIANTS]
    print(f"DeepLIIF, {results[0]['parameters']:,} parameters, {options.devices} processes; MiB in the largest process")
    print(f"  {'variant':30} {'training':>10} {'while saving':>13} {'its part of a checkpoint':>25}")
    for row in results:
        training, saving, part = (row[f"{name}_mib"] for name in ("training", "saving", "snapshot"))
        print(f"  {row['variant']:30} {training:10,.0f} {saving:13,.0f} {part:25,.0f}")
    write_results(options.json, options, results=results)


if __name__ == "__main__":
    main()
