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
from paceline.images.regions.open_image import is_huge
from paceline.inference.compare_images import Pair, compare_regions, read_pair
from paceline.inference.files import match_files, with_suffix
from paceline.runs.weights import is_weights_file

CPU = torch.device("cpu")
FEWEST = 2  # a covariance needs two images
MEGAPIXELS = PIXEL_LIMIT // 10**6


class Fid(NamedTuple):
    """The FID between all results and all targets, computed as in `evaluate`."""

    value: float
    protocol: Protocol
    notes: list[str]
    problems: list[str]  # files that cannot be decoded


def _measure_fid(results: Sequence[Path], targets: Sequence[Path], options: MeasureOptions) -> Fid:
    activity("loading the Inception network")
    network = load_inception(options.inception, options.inception_sha256, CPU)
    usable = {"result": _usable("result", results), "target": _usable("target", targets)}
    problems: list[str] = []
    made, real = (_statistics(kind, files, network, problems) for kind, files in usable.items())
    counts = [int(one.count.item()) for one in (made, real)]
    shown = f"{counts[0]:,} results, {counts[1]:,} targets"
    notes = list(filter(None, [network.few_images_note(min(counts), f"{min(counts):,} images ({shown})")]))
    total = len(results) + len(targets)
    if num_huge := total - sum(map(len, usable.values())):
        notes += [f"FID: left out {num_huge} of {total} images, which have more than {MEGAPIXELS} megapixels"]
    activity("computing FID from the features")
    value = frechet_distance(real.mean, real.covariance, made.mean, made.covariance)
    return Fid(value, {**network.protocol(), "FID images": shown}, notes, problems)


def _usable(kind: str, files: Sequence[Path]) -> list[Path]:
    """Return the files that are not too large; raise UserError if they are too few or have other channels."""
    small = [file for file in files if not is_huge(file)]
    _check_number(kind, len(small))
    for file in small:
        with suppress(BadImage, UnusablePlanes):  # reported when the file is decoded, or its first page is grey or RGB
            header = read_planes_header(file)
            if header and (header.is_stack or header.dtype.kind == "f"):
                raise UserError(
                    f"--inception: FID needs 8-bit images with 1 or 3 channels, unlike {file}; omit --inception"
                )
    return small


def _statistics(kind: str, files: Sequence[Path], network: FeatureNetwork, problems: list[str]) -> Statistics:
    """Return the statistics of the features of images; add files that cannot be decoded to `problems`."""
    sums = FeatureSums(Layout(len(files), network.num_features, network.num_classes, FEWEST), CPU)
    num_used = 0
    for file in counted(files, f"computing features of {kind}s for FID", len(files)):
        try:
            levels = torch.from_numpy(np.array(decode(file).convert("RGB"))).permute(2, 0, 1)[None]
        except BadImage as error:
            problems.append(f"{file}: {error}")
            continue
        sums.add(network(levels, "fp32"), torch.tensor([num_used]))
        num_used += 1
    _check_number(kind, num_used)
    return statistics_from(sums.split(sums.flat()))


def _check_number(kind: str, number: int) -> None:
    if number < FEWEST:
        limit = f"of up to {MEGAPIXELS} megapixels"
        raise UserError(
            f"--inception: FID needs at least {FEWEST} {kind}s {limit}, got {number}; add images, or omit --inception"
        )


Row = dict[str, float]  # the metrics of one image, by name


def protocol_of(row: Row) -> str:
    """Return the protocol in the names of an image's metrics."""
    return next(name[len("psnr[") : -1] for name in row if name.startswith("psnr["))


def means_of(rows: Sequence[Row]) -> tuple[Row, list[str]]:
    """Return the means over the images of each protocol, and the protocols; LPIPS if all of them have it."""
    means: Row = {}
    by_protocol: dict[str, list[Row]] = {}
    for row in rows:
        by_protocol.setdefault(protocol_of(row), []).append(row)
    for protocol, own in by_protocol.items():
        names = [name for name in own[0] if name.endswith(f"[{protocol}]") and all(name in row for row in own)]
        means |= {name: sum(row[name] for row in own) / len(own) for name in names}
    return means, list(by_protocol)


TABLE, REPORT = "--per-image", "--json"
MAX_LISTED = 5  # maximum number of problems to print


def measure(results: str, targets: str, options: MeasureOptions) -> int:
    """Compare images with their targets and print the metrics; return 1 if any file was left out."""
    table, report = (
        check_new_file(out, (suffix,), overwrite=options.overwrite, flag=flag) if out else None
        for flag, out, suffix in ((TABLE, options.per_image, ".csv"), (REPORT, options.json_file, ".json"))
    )
    if not targets:
        raise UserError(f"{results}: no TARGETS to compare with; add them")
    made, real = _images(results), _images(targets)
    # Measured first, so that a wrong file is reported before anything else is measured.
    fid = _measure_fid(with_suffix(made, options.suffix), real, options) if options.inception else None
    rows, metrics, protocol, notes, problems = _compare_all(made, real, options, fid is not None)
    if not rows and (fid is None or options.masks or table):
        raise UserError(f"{results}: no images could be compared with {targets}: {_listed(problems)}")
    if fid:
        metrics, protocol, notes = {**metrics, "FID": fid.value}, {**protocol, **fid.protocol}, [*notes, *fid.notes]
        if not rows:
            notes += [f"only FID was measured, because no result could be compared with a target: {problems[0]}"]
            problems = []
    metrics |= {"count": float(len(rows))} if rows else {}
    count = f": {len(rows):,} image{'s' * (len(rows) != 1)}" if rows else ""
    print_line(f"{results} compared with {targets}{count}")
    print_metrics(metrics, protocol, notes)
    left_out = list(dict.fromkeys([*problems, *(fid.problems if fid else ())]))
    if report:
        content = {"results": results, "targets": targets, "metrics": metrics}
        content |= {"protocol": dict(protocol), "left_out": left_out}
        with new_file(report, REPORT) as temporary:
            temporary.write_text(json_text(content, indent=1))
    if table:
        _write_table(table, rows)
    if left_out:
        what = "files left out of some metrics" if fid else "files left out"
        print_line(f"{what} ({len(left_out)}): {_listed(left_out)}")
    return int(bool(left_out))


class Outcome(NamedTuple):
    """What was measured, by file, and overall; `problems` lists the files that were left out."""

    rows: dict[str, Row]
    metrics: Row
    protocol: Protocol
    notes: list[str]
    problems: list[str]


def _compare_all(made: list[Path], real: list[Path], options: MeasureOptions, has_fid: bool) -> Outcome:
    """Compare each result with its target. If FID is measured, which needs no matching names, there may be no pairs."""
    try:
        pairs, problems = match_files(made, real, options.suffix)
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
            row, pixels, own = _compare(result, target, options, distance, limits)
        except (BadImage, UserError) as error:
            problems.append(f"{result}: {error}")
            continue
        rows[str(result)] = row
        formats.add(pixels)
        if options.masks:
            counts += own
            row |= overlaps(own)
    if not rows:
        return Outcome(rows, {}, {}, [*remarks], problems)
    metrics, labels = means_of(list(rows.values()))
    metrics |= overlaps(counts) if options.masks else {}
    protocol = {"protocol": " and ".join(labels), **_protocol(options, metrics, formats)}
    identical = [name for name, row in rows.items() if np.isclose(row[f"psnr[{protocol_of(row)}]"], PSNR_OF_IDENTICAL)]
    notes = [*remarks, *_notes_on_missing_means(rows, distance)]
    if identical:
        notes += [f"images identical to their targets ({len(identical)} of {len(rows)}): {_listed(identical)}"]
    return Outcome(rows, metrics, protocol, notes, problems)


def _images(path: str) -> list[Path]:
    place = user_path(path)
    if is_weights_file(path):
        raise UserError(f"{path}: a weights file, not images; run `paceline apply` first, or use `paceline evaluate`")
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise UserError(f"{path}: {NOT_FOUND}")
    found = images_under(place)
    if not found:
        raise UserError(f"{path}: contains no images")
    return found


def _compare(
    result: Path, target: Path, options: MeasureOptions, distance: Distance | None, limits: tuple[float, float] | None
) -> tuple[Row, PixelFormat, Tensor]:
    """Return an image's metrics, its pixel format, and the pixel counts of masks. Huge files are read by region."""
    if is_huge(result):
        found = compare_regions(result, target, options.protocol, options.border, masks=options.masks)
        label = protocol_label(options.protocol, found.channels)
        return {f"psnr[{label}]": found.psnr, f"ssim[{label}]": found.ssim}, found.pixels, found.counts
    pair = read_pair(result, target, limits)
    row = _measured(pair, options, distance)
    shown = [levels * (PEAK / pair.pixels.span) for levels in (pair.made, pair.real)] if options.masks else []
    return row, pair.pixels, pixel_counts(shown[0], shown[1]) if shown else torch.zeros(0)


def _measured(pair: Pair, options: MeasureOptions, distance: Distance | None) -> Row:
    made, real, pixels, are_colours = pair
    border, (height, width) = options.border, made.shape[-2:]
    if min(height, width) - 2 * border < WINDOW:
        raise UserError(
            f"{width}×{height} pixels is too small to compare; SSIM needs at least {WINDOW}×{WINDOW} inside the border"
        )
    cut = [levels[..., border : height - border, border : width - border] for levels in (made, real)]
    if not are_colours and (options.masks or options.protocol == "y"):
        flag = "--masks" if options.masks else "--protocol y"
        raise UserError(f"it has {made.shape[1]} channels that are not colours, but {flag} needs grey or RGB images")
    one, other = (luma(levels, pixels.span) for levels in cut) if options.protocol == "y" else cut
    row = {"psnr": psnr(one, other, pixels.span).item(), "ssim": ssim(one, other, pixels.span).item()}
    shown = [levels * (PEAK / pixels.span) for levels in (made, real)]
    row |= {"lpips": distance(shown[0], shown[1]).item()} if distance and are_colours else {}
    label = options.protocol if are_colours else ALL_CHANNELS
    return {f"{name}[{label}]": value for name, value in row.items()}


def _notes_on_missing_means(rows: Mapping[str, Row], distance: Distance | None) -> list[str]:
    """Return why there is no mean of LPIPS if it was not measured for all images."""
    num_missing = sum(not any(key.startswith("lpips[") for key in row) for row in rows.values())
    if distance is None or not num_missing:
        return []
    count = f"{num_missing} of {len(rows)} images (compared by region, or neither grey nor RGB)"
    return [f"LPIPS: no mean, because it was not measured for {count}"]


def _protocol(options: MeasureOptions, metrics: Mapping[str, float], formats: set[PixelFormat]) -> Protocol:
    found: dict[str, str | int | float] = {"border": options.border}
    found |= describe_rounding(*formats) if len(formats) == 1 else {"rounded": "differs between images"}
    found |= {"ssim": f"gaussian window {WINDOW}, sigma {SIGMA}"}
    found |= {"lpips": "alex" if f"lpips[{options.protocol}]" in metrics else "not measured"}
    found |= {"segmentation": f"brightest channel above {MIDDLE}"} if options.masks else {}
    return found


def _write_table(file: Path, rows: Mapping[str, Row]) -> None:
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    with new_file(file, TABLE) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, ["image", *names], restval="")
        writer.writeheader()
        writer.writerows({"image": printable(name), **row} for name, row in rows.items())


def _listed(problems: Sequence[str]) -> str:
    more = f"; and {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
    return "; ".join(problems[:MAX_LISTED]) + more
