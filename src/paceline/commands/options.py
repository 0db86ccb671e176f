"""The options of commands, each declared once, with its bounds. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from paceline.core.files import SAFETENSORS

Checkpoint = Annotated[
    str, typer.Option(help="checkpoint to load: best, last, or the number of images seen at the checkpoint")
]
Accelerator = Annotated[str, typer.Option(help="type of device to run on: auto, cpu or cuda")]
Interpolate = Annotated[
    float,
    typer.Option(
        help="fraction of this model, from 0 to 1, when it is interpolated with the model in --interpolate-with"
    ),
]
InterpolateWith = Annotated[
    str,
    typer.Option(
        help=f"second model for --interpolate: a run or a {SAFETENSORS} file (default: the run's --init-from)",
        metavar="RUN|WEIGHTS",
    ),
]


@dataclass(frozen=True)
class SampleOptions:
    """How `sample` generates images, and what it shows."""

    checkpoint: Checkpoint = "best"
    grid: Annotated[str, typer.Option(help="for generators: number of rows and columns in the grid (default: 8x8)")] = (
        ""
    )
    interpolate: Annotated[
        bool, typer.Option("--interpolate", help="fill each row with interpolations between two images")
    ] = False
    count: Annotated[
        int, typer.Option(min=0, help="for generators: write this many image files to the folder --to")
    ] = 0
    to: Annotated[str, typer.Option(help="new folder for the images of --count", metavar="DIR")] = ""
    label: Annotated[
        str | None,
        typer.Option("--class", help="generate images of this class; all: one class per row", metavar="NAME"),
    ] = None
    truncation: Annotated[
        float, typer.Option(help="scale the noise; below 1, images are more alike and often look better")
    ] = 1.0
    nearest: Annotated[
        bool, typer.Option("--nearest", help="show each image next to the training images most similar to it")
    ] = False
    inception: Annotated[
        str,
        typer.Option(
            help="for --nearest: file with the 2015 Inception network, or torch-fidelity, which computes the features"
        ),
    ] = ""
    data_root: Annotated[
        str, typer.Option(help="for --nearest and strips: where the run's data is now, if it was moved")
    ] = ""
    animate: Annotated[bool, typer.Option("--animate", help="show how the images changed during training")] = False
    accelerator: Accelerator = ""

    @property
    def kind(self) -> str:
        """The default name of the output file, without its suffix."""
        kinds = {"animation": self.animate, "interpolation": self.interpolate, "nearest": self.nearest}
        return next((name for name, is_chosen in kinds.items() if is_chosen), "grid")

    @property
    def flag(self) -> str:
        """The first flag that only generators have; empty if there is none."""
        flags = {
            f"--grid {self.grid}": self.grid,
            "--interpolate": self.interpolate,
            "--nearest": self.nearest,
            f"--class {self.label}": self.label,
            f"--truncation {self.truncation:g}": self.truncation != 1,
        }
        return next((flag for flag, is_given in flags.items() if is_given), "")


@dataclass(frozen=True)
class ApplyOptions:
    """How `apply` processes images, and how it writes them."""

    checkpoint: Checkpoint = "best"
    accelerator: Accelerator = ""
    devices: Annotated[int, typer.Option(help="number of devices to split the images and their tiles across")] = 1
    gpus: Annotated[str, typer.Option(help="IDs of the GPUs to use, e.g. 2,3")] = ""
    tile: Annotated[int, typer.Option(min=0, help="tile size in pixels; 0: the largest that fits in memory")] = 0
    precision: Annotated[Literal["fp32", "tf32", "bf16", "fp16"], typer.Option(help="numerical precision")] = "fp32"
    compile: Annotated[
        Literal["on", "off"],
        typer.Option("--compile", help="compile the networks; useful for many images of the same size"),
    ] = "off"
    format: Annotated[
        str,
        typer.Option(
            "--format",
            help="file format: png, jpg, webp, tiff or ome-tiff (default: ome-tiff for OME-TIFF, tiff for other TIFF "
            "and slides, else png)",
        ),
    ] = ""
    quality: Annotated[int, typer.Option(min=1, max=100, help="quality of jpg and webp files, from 1 to 100")] = 95
    compression: Annotated[
        int | None,
        typer.Option(min=0, max=9, help="compression of png and tiff files, from 0 (none) to 9 (small, slow)"),
    ] = None
    level: Annotated[
        int, typer.Option(min=0, help="for TIFF pyramids and slides: level to read; 0: full resolution")
    ] = 0
    magnification: Annotated[
        float, typer.Option(min=0, help="for slides: magnification to read, such as 20; 0: use --level")
    ] = 0.0
    region: Annotated[
        str, typer.Option(help="for TIFF files and slides: process only this part", metavar="X,Y,WIDTH,HEIGHT")
    ] = ""
    skip_background: Annotated[
        bool, typer.Option("--skip-background", help="for TIFF files and slides: skip bright, colourless tiles")
    ] = False
    downsample: Annotated[
        Literal["", "bicubic"],
        typer.Option(help="downsample images first, then compare results with the originals", metavar="bicubic"),
    ] = ""
    panel: Annotated[
        int | None,
        typer.Option(
            help="for images that are a row of square panels: which panel to process, counting from 1; 0: whole image",
            min=0,
        ),
    ] = None
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace existing results")] = False
    skip_existing: Annotated[bool, typer.Option("--skip-existing", help="skip images that already have results")] = (
        False
    )
    interpolate: Interpolate = 1.0
    interpolate_with: InterpolateWith = ""


@dataclass(frozen=True)
class MeasureOptions:
    """What `measure` compares, and where it writes the metrics."""

    protocol: Annotated[Literal["rgb", "y"], typer.Option(help="what to compare: all channels, or luma only")] = "rgb"
    border: Annotated[
        int,
        typer.Option(min=0, help="number of pixels to ignore at each edge; `evaluate` uses the scale factor"),
    ] = 0
    masks: Annotated[
        bool, typer.Option("--masks", help="treat the images as segmentation masks: also measure IoU and Dice")
    ] = False
    suffix: Annotated[
        str, typer.Option(help="use only results whose file name, without the extension, ends with this text, e.g. -sr")
    ] = ""
    json_file: Annotated[
        str, typer.Option("--json", help="also write the metrics to this .json file", metavar="FILE")
    ] = ""
    per_image: Annotated[str, typer.Option(help="also write each image's metrics to this .csv file")] = ""
    inception: Annotated[str, typer.Option(help="file with the 2015 Inception network for FID, or torch-fidelity")] = ""
    inception_sha256: Annotated[str, typer.Option(help="SHA-256 of an --inception file that you trust")] = ""
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace existing files")] = False
    value_range: Annotated[
        str, typer.Option(metavar="LOW,HIGH", help="value range of floating-point images, for PSNR and SSIM")
    ] = ""


@dataclass(frozen=True)
class PlanOptions:
    """The machine that `plan` predicts for, and what it prints."""

    nodes: Annotated[int, typer.Option(help="number of hosts that the devices are spread across", min=1)] = 1
    bandwidth: Annotated[
        str, typer.Option(help="bandwidth between devices, e.g. 25GB/s or 200Gbit/s (default: measured)")
    ] = ""
    latency: Annotated[
        str, typer.Option(help="latency of one exchange between devices (default: measured, or 20us with --bandwidth)")
    ] = ""
    check: Annotated[
        bool, typer.Option("--check", help="also measure the actual speed and print the prediction error")
    ] = False
    memory: Annotated[
        bool, typer.Option("--memory", help="print the memory that each strategy needs per GPU instead of the speed")
    ] = False
    device_memory: Annotated[
        str, typer.Option(help="memory of one GPU, e.g. 24GiB, to find the largest batch (default: this machine's GPU)")
    ] = ""
