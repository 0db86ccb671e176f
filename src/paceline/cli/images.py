"""Command-line arguments for sample, apply, measure, predict, import and export."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from paceline.cli.flags import Accelerator, Assignments, Checkpoint, Interpolate, InterpolateWith, Trust, Weights


def sample(
    run: Weights,
    out: Annotated[
        str, typer.Option(help="file to write: .png, or .gif or .webp for animations (default: in the run folder)")
    ] = "",
    checkpoint: Checkpoint = "best",
    grid: Annotated[
        str, typer.Option(help="for generators: number of rows and columns in the grid (default: 8x8)")
    ] = "",
    interpolate: Annotated[
        bool, typer.Option("--interpolate", help="fill each row with interpolations between two images")
    ] = False,
    count: Annotated[int, typer.Option(help="for generators: write this many image files to the folder --to")] = 0,
    to: Annotated[str, typer.Option(help="new folder for the images of --count", metavar="DIR")] = "",
    class_: Annotated[
        str | None,
        typer.Option("--class", help="generate images of this class; all: one class per row", metavar="NAME"),
    ] = None,
    truncation: Annotated[
        float, typer.Option(help="scale the noise; below 1, images are more alike and often look better")
    ] = 1.0,
    nearest: Annotated[
        bool, typer.Option("--nearest", help="show each image next to the training images most similar to it")
    ] = False,
    inception: Annotated[
        str,
        typer.Option(
            help="for --nearest: file with the 2015 Inception network, or torch-fidelity, which computes the features"
        ),
    ] = "",
    data_root: Annotated[
        str, typer.Option(help="for --nearest and strips: where the run's data is now, if it was moved")
    ] = "",
    animate: Annotated[bool, typer.Option("--animate", help="show how the images changed during training")] = False,
    next_to: Annotated[
        str, typer.Option(help="second run, whose images are shown alongside the first run's", metavar="RUN")
    ] = "",
    accelerator: Accelerator = "",
    trust: Trust = False,
) -> None:
    """Save sample images from a run: a grid for generators, side-by-side strips for other image models.

    The random inputs or held-out images are always the same, so that runs and checkpoints can be compared.
    """
    from paceline.commands.sample import Options
    from paceline.commands.sample import sample as job

    options = Options(
        grid=grid,
        interpolate=interpolate,
        animate=animate,
        checkpoint=checkpoint,
        accelerator=accelerator,
        count=count,
        to=to,
        label=class_,
        truncation=truncation,
        nearest=nearest,
        inception=inception,
        data_root=data_root,
    )
    raise typer.Exit(job([run, *filter(None, [next_to])], out, options))


def apply(
    run: Weights,
    images: Annotated[
        list[str], typer.Argument(metavar="IMAGES…", help="images to process: files, folders or glob patterns")
    ],
    out: Annotated[str, typer.Option(help="the folder to write to", metavar="DIR")],
    checkpoint: Checkpoint = "best",
    accelerator: Accelerator = "",
    devices: Annotated[int, typer.Option(help="number of devices to split the images and their tiles across")] = 1,
    gpus: Annotated[str, typer.Option(help="IDs of the GPUs to use, e.g. 2,3")] = "",
    tile: Annotated[int, typer.Option(help="tile size in pixels; 0: the largest that fits in memory")] = 0,
    precision: Annotated[
        str, typer.Option(help="fp32, tf32, bf16 or fp16; for the last three, the difference from fp32 is printed")
    ] = "fp32",
    compile_: Annotated[
        Literal["on", "off"],
        typer.Option("--compile", help="compile the networks; useful for many images of the same size"),
    ] = "off",
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            help="file format: png, jpg, webp, tiff or ome-tiff (default: ome-tiff for OME-TIFF, tiff for other TIFF "
            "and slides, else png)",
        ),
    ] = "",
    quality: Annotated[int, typer.Option(help="quality of jpg and webp files, from 1 to 100")] = 95,
    compression: Annotated[
        int | None, typer.Option(help="compression of png and tiff files, from 0 (none) to 9 (small, slow)")
    ] = None,
    level: Annotated[int, typer.Option(help="for TIFF pyramids and slides: level to read; 0: full resolution")] = 0,
    magnification: Annotated[
        float, typer.Option(help="for slides: magnification to read, such as 20; 0: use --level")
    ] = 0.0,
    region: Annotated[
        str, typer.Option(help="for TIFF files and slides: process only this part", metavar="X,Y,WIDTH,HEIGHT")
    ] = "",
    skip_background: Annotated[
        bool, typer.Option("--skip-background", help="for TIFF files and slides: skip bright, colourless tiles")
    ] = False,
    preview: Annotated[
        bool, typer.Option("--preview", help="for TIFF files and slides: also write a small JPEG of each result")
    ] = False,
    downsample: Annotated[
        str, typer.Option(help="downsample images first, then compare results with the originals", metavar="bicubic")
    ] = "",
    panel: Annotated[
        int | None,
        typer.Option(
            help="for images that are a row of square panels: which panel to process, counting from 1; 0: whole image"
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace existing results")] = False,
    skip_existing: Annotated[
        bool, typer.Option("--skip-existing", help="skip images that already have results")
    ] = False,
    interpolate: Interpolate = 1.0,
    interpolate_with: InterpolateWith = "",
    trust: Trust = False,
) -> None:
    """Upscale, restore or translate images of any size."""
    from paceline.commands.apply import Options
    from paceline.commands.apply import apply as job
    from paceline.images.encode import Encoding
    from paceline.inference.apply_regions import RegionOptions
    from paceline.inference.trained import Blend

    options = Options(
        checkpoint,
        accelerator,
        devices,
        gpus,
        tile,
        downsample,
        overwrite,
        skip_existing,
        panel,
        blend=Blend(interpolate, interpolate_with),
        precision=precision,
        compiled=compile_ == "on",
        encoding=Encoding(format_, quality, compression),
        regions=RegionOptions(level, magnification, region, skip_background, preview),
    )
    raise typer.Exit(job(run, images, out, options))


def measure(
    results: Annotated[str, typer.Argument(metavar="RESULTS", help="a folder of images, or one image")],
    targets: Annotated[
        str,
        typer.Argument(metavar="TARGETS", help="a folder of target images, or one image; optional with --niqe"),
    ] = "",
    protocol: Annotated[str, typer.Option(help="what to compare: rgb (all channels) or y (luma only)")] = "rgb",
    border: Annotated[
        int,
        typer.Option(help="number of pixels to ignore at each edge; `evaluate` uses the scale factor"),
    ] = 0,
    masks: Annotated[
        bool, typer.Option("--masks", help="treat the images as segmentation masks: also measure IoU and Dice")
    ] = False,
    suffix: Annotated[
        str, typer.Option(help="use only results whose file name, without the extension, ends with this text, e.g. -sr")
    ] = "",
    json: Annotated[str, typer.Option(help="also write the metrics to this .json file", metavar="FILE")] = "",
    per_image: Annotated[str, typer.Option(help="also write each image's metrics to this .csv file")] = "",
    inception: Annotated[
        str, typer.Option(help="file with the 2015 Inception network for FID, or torch-fidelity")
    ] = "",
    inception_sha256: Annotated[str, typer.Option(help="SHA-256 of an --inception file that you trust")] = "",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace existing files")] = False,
    niqe: Annotated[
        bool, typer.Option("--niqe", help="also measure NIQE, a quality metric that needs no reference image")
    ] = False,
    value_range: Annotated[
        str, typer.Option(metavar="LOW,HIGH", help="value range of floating-point images, for PSNR and SSIM")
    ] = "",
) -> None:
    """Compare images from any program with their targets: PSNR, SSIM, LPIPS, NIQE, FID, IoU and Dice."""
    from paceline.commands.measure import Options
    from paceline.commands.measure import measure as job

    files = (suffix, json, per_image, inception, inception_sha256)
    options = Options(protocol, border, masks, *files, overwrite, niqe, value_range)
    raise typer.Exit(job(results, targets, options))


def predict(
    run: Weights,
    images: Annotated[
        list[str], typer.Argument(metavar="IMAGES…", help="images to classify: files, folders or glob patterns")
    ],
    top: Annotated[int, typer.Option(help="number of classes to list per image")] = 5,
    out: Annotated[str, typer.Option(help="also write predictions to this .csv or .jsonl file", metavar="FILE")] = "",
    checkpoint: Checkpoint = "best",
    accelerator: Accelerator = "",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the file if it exists")] = False,
    trust: Trust = False,
) -> None:
    """Classify images with a trained classifier.

    Each image is centre-cropped and scaled to the size that was used to evaluate the run.
    """
    from paceline.commands.predict import predict as job

    raise typer.Exit(job(run, images, top, out, checkpoint, accelerator, overwrite=overwrite))


def import_weights(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE…",
            help="a .pth or .safetensors file; for translation, all .pth files or the folder that contains them",
        ),
    ],
    out: Annotated[str, typer.Option(help="the .safetensors file to write", metavar="FILE")],
    recipe: Annotated[
        str,
        typer.Option(
            help="recipe that the weights are for: classification for timm, super_resolution for SRGAN, esrgan for "
            "RRDBNet with a discriminator, translation for pix2pix and DeepLIIF; without --recipe, the network must be "
            "one that spandrel recognises"
        ),
    ] = "",
    preset: Annotated[str, typer.Option(help="named set of settings defined by the recipe")] = "",
    set_: Assignments = [],  # noqa: B006
) -> None:
    """Import weights from other projects: networks known to spandrel, timm classifiers, SRGAN, pix2pix and others.

    The package spandrel recognises networks such as ESRGAN, SwinIR and NAFNet. Other files need --recipe.
    """
    from paceline.commands.import_weights import import_weights as job

    raise typer.Exit(job(files, recipe, out, preset, set_))


def export(
    run: Weights,
    out: Annotated[str, typer.Option(help="the .onnx file to write", metavar="FILE")],
    checkpoint: Checkpoint = "best",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the file if it exists")] = False,
    interpolate: Interpolate = 1.0,
    interpolate_with: InterpolateWith = "",
    trust: Trust = False,
) -> None:
    """Export a trained model to ONNX and compare its results with PyTorch's.

    Image-to-image models take images of any size and return images; all values are in [-1, 1]. Classifiers take uint8
    images of the size used in evaluation and return class probabilities. Generators take noise and return images with
    values in [-1, 1].
    """
    from paceline.commands.export import export as job
    from paceline.inference.trained import Blend

    raise typer.Exit(job(run, out, checkpoint, overwrite=overwrite, blend=Blend(interpolate, interpolate_with)))
