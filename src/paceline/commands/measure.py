"""`paceline measure`: compare images from any program with their targets."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.commands.evaluate import print_metrics
from paceline.commands.options import MeasureOptions
from paceline.contracts.data_spec import PixelFormat
from paceline.core.errors import NOT_FOUND, UserError
from paceline.core.files import check_new_file, json_text, new_file, user_path
from paceline.core.terminal import activity, counted
from paceline.core.text import print_line, printable
from paceline.data.file_lists import images_under
from paceline.evaluation.features import FeatureNetwork, load_inception
from paceline.evaluation.image_metrics import (
    ALL_CHANNELS,
    CLASSES,
    MIDDLE,
    PEAK,
    PSNR_OF_IDENTICAL,
    SIGMA,
    WINDOW,
    Distance,
    describe_rounding,
    luma,
    overlaps,
    perceptual_distance,
    pixel_counts,
    protocol_label,
    psnr,
    ssim,
)
from paceline.evaluation.protocol import Protocol
from paceline.evaluation.statistics import (
    FeatureSums,
    Layout,
    Statistics,
    frechet_distance,
    statistics_from,
)
from paceline.images.decode import PIXEL_LIMIT, BadImage, decode
from paceline.images.deep import UnusablePlanes, read_planes_header
from paceline.images.readers import parse_range
from paceline.images.regions import is_huge
from paceline.inference.compare_images import compare_regions, read_pair
from paceline.inference.files import match_files, with_suffix
from paceline.runs.weights import is_weights_file

CPU = torch.device("cpu")
MIN_IMAGES = 2  # for FID; a covariance needs two images
TABLE, REPORT = "--per-image", "--json"
MAX_LISTED = 5  # maximum number of problems to print

Row = dict[str, float]  # the metrics of one image, by name


class Outcome(NamedTuple):
    """What was measured, by file, and overall; `problems` lists the files that were left out."""

    rows: dict[str, Row]
    metrics: Row
    protocol: Protocol
    notes: list[str]
    problems: list[str]


def measure(results: str, targets: str, options: MeasureOptions) -> int:
    """Compare images with their targets and print the metrics; return 1 if any file was left out."""
    table, report = (
        check_new_file(out, (suffix,), overwrite=options.overwrite, flag=flag) if out else None
        for flag, out, suffix in ((TABLE, options.per_image, ".csv"), (REPORT, options.json_file, ".json"))
    )
    result_files, target_files = _images(results), _images(targets)
    # FID is measured first, so that a wrong file is reported before anything else is measured.
    chosen = with_suffix(result_files, options.suffix)
    fid = _measure_fid(chosen, target_files, options) if options.inception else None
    rows, metrics, protocol, notes, problems = _compare_all(result_files, target_files, options, fid is not None)
    if not rows and (fid is None or options.masks or table):
        raise UserError(f"{results}: no images could be compared with {targets}: {_listed(problems)}")
    if fid:
        metrics, protocol = metrics | fid.metrics, {**protocol, **fid.protocol}
        if not rows:
            notes.append(f"only FID was measured, because no result could be compared with a target: {problems[0]}")
            problems = []
        notes, problems = notes + fid.notes, list(dict.fromkeys(problems + fid.problems))
    metrics |= {"count": float(len(rows))} if rows else {}
    count = f": {len(rows):,} image{'s' * (len(rows) != 1)}" if rows else ""
    print_line(f"{results} compared with {targets}{count}")
    print_metrics(metrics, protocol, notes)
    if report:
        content = {"results": results, "targets": targets, "metrics": metrics}
        content |= {"protocol": dict(protocol), "left_out": problems}
        with new_file(report, REPORT) as temporary:
            temporary.write_text(json_text(content, indent=1))
    if table:
        _write_table(table, rows)
    if problems:
        what = "files left out of some metrics" if fid else "files left out"
        print_line(f"{what} ({len(problems)}): {_listed(problems)}")
    return int(bool(problems))


def _images(path: str) -> list[Path]:
    if is_weights_file(path):
        raise UserError(f"{path}: a weights file, not images; run `paceline apply` first, or use `paceline evaluate`")
    place = user_path(path)
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise UserError(f"{path}: {NOT_FOUND}")
    if files := images_under(place):
        return files
    raise UserError(f"{path}: contains no images")


def _measure_fid(results: Sequence[Path], targets: Sequence[Path], options: MeasureOptions) -> Outcome:
    """Measure the FID between all results and all targets, computed as in `evaluate`."""
    activity("loading the Inception network")
    network = load_inception(options.inception, options.inception_sha256, CPU)
    for file in (*results, *targets):
        header = None
        with suppress(BadImage, UnusablePlanes):  # reported when the file is decoded, or its first page is grey or RGB
            header = read_planes_header(file)
        if is_huge(file) or (header and (header.is_stack or header.dtype.kind == "f")):
            limits = f"8-bit images with 1 or 3 channels and up to {PIXEL_LIMIT // 10**6} megapixels"
            raise UserError(f"--inception: FID needs {limits}, unlike {file}; omit --inception")
    problems: list[str] = []
    made, real = (_statistics(*one, network, problems) for one in (("result", results), ("target", targets)))
    counts = [int(one.count.item()) for one in (made, real)]
    shown = f"{counts[0]:,} results, {counts[1]:,} targets"
    note = network.few_images_note(min(counts), f"{min(counts):,} images ({shown})")
    activity("computing FID from the features")
    value = frechet_distance(real.mean, real.covariance, made.mean, made.covariance)
    return Outcome({}, {"FID": value}, {**network.protocol(), "FID images": shown}, [note] if note else [], problems)


def _statistics(kind: str, files: Sequence[Path], network: FeatureNetwork, problems: list[str]) -> Statistics:
    """Return the statistics of the features of images; add files that cannot be decoded to `problems`."""
    sums = FeatureSums(Layout(len(files), network.num_features, network.num_classes, MIN_IMAGES), CPU)
    num_used = 0
    for file in counted(files, f"computing features of {kind}s for FID", len(files)):
        try:
            levels = torch.from_numpy(np.array(decode(file).convert("RGB"))).permute(2, 0, 1)[None]
        except BadImage as error:
            problems.append(f"{file}: {error}")
            continue
        sums.add(network(levels, "fp32"), torch.tensor([num_used]))
        num_used += 1
    if num_used < MIN_IMAGES:
        what = f"FID needs at least {MIN_IMAGES} {kind}s, got {num_used}"
        raise UserError(f"--inception: {what}; add images, or omit --inception")
    return statistics_from(sums.split(sums.flat()))


def _compare_all(results: list[Path], targets: list[Path], options: MeasureOptions, has_fid: bool) -> Outcome:
    """Compare each result with its target. If FID is measured, which needs no matching names, there may be no pairs."""
    try:
        pairs, problems = match_files(results, targets, options.suffix)
    except UserError as error:
        if not has_fid:
            raise
        pairs, problems = [], [str(error)]
    distance, remarks = perceptual_distance(CPU) if pairs else (None, ())
    rows: dict[str, Row] = {}
    counts = torch.zeros(len(CLASSES), 3, dtype=torch.float64)
    formats: set[PixelFormat] = set()
    limits = parse_range(options.value_range, "--value-range ") if options.value_range else None
    for result, target in counted(pairs, "comparing images", len(pairs)):
        try:
            row, pixels, masks = _compare(result, target, options, distance, limits)
        except (BadImage, UserError) as error:
            problems.append(f"{result}: {error}")
            continue
        rows[str(result)] = row
        formats.add(pixels)
        if options.masks:
            counts += masks
            row |= overlaps(masks)
    if not rows:
        return Outcome(rows, {}, {}, [*remarks], problems)
    metrics: Row = {}
    labels: dict[str, list[Row]] = {}
    for row in rows.values():
        labels.setdefault(_label_of(row), []).append(row)
    for label, alike in labels.items():  # LPIPS has a mean if all images of a protocol have it
        names = [name for name in alike[0] if name.endswith(f"[{label}]") and all(name in row for row in alike)]
        metrics |= {name: sum(row[name] for row in alike) / len(alike) for name in names}
    metrics |= overlaps(counts) if options.masks else {}
    protocol = {"protocol": " and ".join(labels), **_protocol(options, metrics, formats)}
    notes = [*remarks, *_notes_on_missing_means(rows, distance)]
    if same := [name for name, row in rows.items() if np.isclose(row[f"psnr[{_label_of(row)}]"], PSNR_OF_IDENTICAL)]:
        notes += [f"images identical to their targets ({len(same)} of {len(rows)}): {_listed(same)}"]
    return Outcome(rows, metrics, protocol, notes, problems)


def _label_of(row: Row) -> str:
    """Return the protocol in the names of an image's metrics."""
    return next(name[len("psnr[") : -1] for name in row if name.startswith("psnr["))


def _compare(
    result: Path, target: Path, options: MeasureOptions, distance: Distance | None, limits: tuple[float, float] | None
) -> tuple[Row, PixelFormat, Tensor]:
    """Return an image's metrics, its pixel format, and the pixel counts of masks. Huge files are read by region."""
    if is_huge(result):
        whole = compare_regions(result, target, options.protocol, options.border, masks=options.masks)
        label = protocol_label(options.protocol, whole.channels)
        return {f"psnr[{label}]": whole.psnr, f"ssim[{label}]": whole.ssim}, whole.pixels, whole.counts
    made, real, pixels, are_colours = read_pair(result, target, limits)
    border, (height, width) = options.border, made.shape[-2:]
    if min(height, width) - 2 * border < WINDOW:
        raise UserError(
            f"{width}×{height} pixels is too small to compare; SSIM needs at least {WINDOW}×{WINDOW} inside the border"
        )
    if not are_colours and (options.masks or options.protocol == "y"):
        flag = "--masks" if options.masks else "--protocol y"
        raise UserError(f"it has {made.shape[1]} channels that are not colours, but {flag} needs grey or RGB images")
    cut = [levels[..., border : height - border, border : width - border] for levels in (made, real)]
    one, other = (luma(levels, pixels.span) for levels in cut) if options.protocol == "y" else cut
    row = {"psnr": psnr(one, other, pixels.span).item(), "ssim": ssim(one, other, pixels.span).item()}
    shown = [levels * (PEAK / pixels.span) for levels in (made, real)]
    row |= {"lpips": distance(shown[0], shown[1]).item()} if distance and are_colours else {}
    label = options.protocol if are_colours else ALL_CHANNELS
    masks = pixel_counts(shown[0], shown[1]) if options.masks else torch.zeros(0)
    return {f"{name}[{label}]": value for name, value in row.items()}, pixels, masks


def _notes_on_missing_means(rows: Mapping[str, Row], distance: Distance | None) -> list[str]:
    """Return why LPIPS has no mean if it was not measured for all images."""
    num_missing = sum(not any(key.startswith("lpips[") for key in row) for row in rows.values())
    if not distance or not num_missing:
        return []
    count = f"{num_missing} of {len(rows)} images (compared by region, or neither grey nor RGB)"
    return [f"LPIPS: no mean, because it was not measured for {count}"]


def _protocol(options: MeasureOptions, metrics: Mapping[str, float], formats: set[PixelFormat]) -> Protocol:
    protocol: dict[str, str | int | float] = {"border": options.border}
    protocol |= describe_rounding(*formats) if len(formats) == 1 else {"rounded": "differs between images"}
    protocol |= {"ssim": f"gaussian window {WINDOW}, sigma {SIGMA}"}
    protocol |= {"lpips": "alex" if f"lpips[{options.protocol}]" in metrics else "not measured"}
    protocol |= {"segmentation": f"brightest channel above {MIDDLE}"} if options.masks else {}
    return protocol


def _write_table(file: Path, rows: Mapping[str, Row]) -> None:
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    with new_file(file, TABLE) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, ["image", *names], restval="")
        writer.writeheader()
        writer.writerows({"image": printable(name), **row} for name, row in rows.items())


def _listed(problems: Sequence[str]) -> str:
    more = f"; and {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
    return "; ".join(problems[:MAX_LISTED]) + more
