"""`paceline apply` and `paceline predict`: use a trained model on images of any size."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from paceline.commands.configure import available_devices, choose_device
from paceline.commands.options import ApplyOptions
from paceline.core.errors import UserError
from paceline.core.files import check_new_file, new_file, user_path
from paceline.core.terminal import counted
from paceline.core.text import print_line
from paceline.core.types import SettingValue
from paceline.images.encode import Encoding, check_encoding
from paceline.inference.apply import DOWNSAMPLED, AppliedImage, Applier, ApplierSettings, ApplyProgress
from paceline.inference.apply_regions import RegionOptions, apply_all, read_headers
from paceline.inference.files import count_images, find_images, plan_results, report_skipped
from paceline.inference.model import Model, classify_files, prediction_file
from paceline.inference.trained import Blend, TrainedModel, check_use, open_image_model, read_stored
from paceline.parallel.world import gpu_ids, uses_cuda
from paceline.runs.finished_run import last_finished
from paceline.runs.recipe import resolve_settings


def apply(path: str, arguments: list[str], out: str, options: ApplyOptions) -> int:
    """Apply a run or a weights file to images and write the results; return 1 if images were skipped."""
    if not out:
        raise UserError("--out: the name of the folder is empty; choose a folder")
    if options.overwrite and options.skip_existing:
        raise UserError("--overwrite --skip-existing: cannot be combined; choose one")
    encoding = Encoding(options.format, options.quality, options.compression)
    check_encoding(encoding)
    regions = RegionOptions(options.level, options.magnification, options.region, options.skip_background)
    regions.check()
    devices = _devices(options)
    path, folder = last_finished(path), user_path(out)
    blend = Blend(options.interpolate, options.interpolate_with)
    image_model = open_image_model(path, options.checkpoint, blend)
    plan = plan_results(
        arguments,
        folder,
        _result_names(image_model, path, options),
        encoding,
        with_masks=options.skip_background,
        overwrite=options.overwrite,
        skip_existing=options.skip_existing,
    )
    lines = [_describe(image_model, len(plan.tasks), devices), *plan.notes]
    for line in lines:
        print_line(line)
    num_images = len(plan.tasks) + len(plan.skipped)
    sizes = read_headers(plan, regions, encoding.format)
    if sizes:
        _make_folder(folder)
    settings = ApplierSettings(
        options.tile, options.downsample, options.panel, options.precision, options.compile == "on", encoding
    )
    num_done = 0
    try:
        with ApplyProgress(sum(size.num_pixels for size in sizes.values())) as progress:
            applier = Applier(settings, image_model, devices)
            for outcome in apply_all(applier, sizes, regions, progress):
                for note in applier.new_notes():
                    print_line(note)
                if isinstance(outcome, AppliedImage):
                    num_done += 1
                    print_line(outcome.summary)
                else:
                    plan.skipped.append(outcome)
    except KeyboardInterrupt:
        # After --overwrite, --skip-existing would mistake older results for new ones.
        hint = "" if options.overwrite else "; use --skip-existing to process the rest"
        print_line(f"{num_done} of {num_images} images were processed{hint}", sys.stderr)
        raise
    return report_skipped(plan.skipped, num_done, plan.ignored, folder)


def _devices(options: ApplyOptions) -> list[torch.device]:
    """Return the devices to use; raise UserError for devices that this machine does not have."""
    flags: dict[str, SettingValue] = {"accelerator": options.accelerator or "auto"}
    flags |= {"devices": options.devices, "gpus": options.gpus}
    settings = resolve_settings("apply", [("flag", flags)])
    num_devices = available_devices(settings)
    if not uses_cuda(settings):
        if options.precision == "tf32":
            raise UserError("--precision tf32: needs a GPU; use fp32 on the CPU")
        torch.set_num_threads(max(1, torch.get_num_threads() // num_devices))
        return [torch.device("cpu")] * num_devices
    return [torch.device("cuda", number) for number in gpu_ids(dataclasses.replace(settings, devices=num_devices))]


def _result_names(image_model: TrainedModel, path: str, options: ApplyOptions) -> Sequence[str]:
    """Return the names of the results computed for each image; the name is "" if there is only one result."""
    if not options.downsample:
        return image_model.results if len(image_model.results) > 1 else ("",)
    if image_model.output_scale == 1:
        raise UserError(f"--downsample: only for models that upscale, but {path} does not change the image size")
    return DOWNSAMPLED


def _describe(image_model: TrainedModel, count: int, devices: Sequence[torch.device]) -> str:
    if image_model.output_scale > 1:
        kind = f"upscales {image_model.output_scale}×"
    else:
        kind = f"predicts {', '.join(image_model.results)}" if len(image_model.results) > 1 else "keeps the image size"
    counts = Counter(map(str, devices))
    where = ", ".join(f"{number} × {name}" if number > 1 else name for name, number in counts.items())
    return f"{image_model.config.recipe_name} from {image_model.origin}: {kind}; {count_images(count)} on {where}"


def _make_folder(out: Path) -> None:
    """Create the output folder and check that it is writable."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise UserError(f"--out {out}: cannot write to this folder: {error.strerror or error}") from None


def predict(
    path: str, arguments: list[str], top: int, out: str, checkpoint: str, accelerator: str, *, overwrite: bool = False
) -> int:
    """Print the most likely classes for each image and, if `out` is given, also write them to that file.

    Return 1 if images were skipped.
    """
    target = check_new_file(out, (".csv",), overwrite=overwrite) if out else None
    device = choose_device("predict", accelerator)
    path = last_finished(path)
    stored = read_stored(path, checkpoint)
    check_use(stored, "predict", path)
    found = find_images(arguments)
    model = Model(stored, path, device)
    top, count = min(top, len(model.classes)), count_images(len(found.images))
    header = f"{stored.config.recipe_name} from {model.origin}: {len(model.classes)} classes; {count} on {device}"
    for line in (header, *found.notes):
        print_line(line)
    num_done = 0
    with ExitStack() as stack:
        write = None
        if target:
            temporary = stack.enter_context(new_file(target))
            write = stack.enter_context(prediction_file(temporary, top))
        classified = classify_files(model, found.images, top, found.skipped)
        for image, classes in counted(classified, "classifying images", len(found.images)):
            num_done += 1
            print_line(f"{image}: {', '.join(f'{name} ({probability:.1%})' for name, probability in classes)}")
            if write:
                write(image, classes)
    if target:
        print_line(f"{num_done:,} of {count} → {target}" if found.skipped else f"{count} → {target}")
    return report_skipped(found.skipped, num_done, found.ignored, target)
