"""`paceline sample`: save a run's images as a grid, strips, an interpolation or an animation."""

from __future__ import annotations

import re
from pathlib import Path

from paceline.commands.configure import checked, choose_device
from paceline.commands.options import SampleOptions
from paceline.config.flags import FOLDERS
from paceline.config.resolve import Inherited
from paceline.core.errors import NOT_FOUND, UserError
from paceline.core.files import check_creatable, new_file, user_path
from paceline.core.terminal import activity, counted
from paceline.core.text import print_line
from paceline.core.types import SettingValue
from paceline.images.encode import DEFAULT_ENCODING
from paceline.images.grids import ANIMATED_SUFFIXES, captioned, save_animation, side_by_side
from paceline.inference.generate import GridOptions, animation_frames, show_run, write_samples
from paceline.inference.model import EVERY_CLASS, Model, check_truncation, class_index
from paceline.inference.trained import check_use, read_stored
from paceline.runs.finished_run import check_not_file, config_of, last_finished
from paceline.runs.weights import is_weights_file

DEFAULT_GRID = "8x8"
LARGEST_GRID = 4096  # maximum number of images


def sample(runs: list[str], out: str, options: SampleOptions) -> int:
    """Write an image or an animation that shows one run, or several runs side by side."""
    _check_options(options)
    if options.count and (out or len(runs) > 1):
        unused = f"--out {out}" if out else f"--next-to {runs[1]}"
        raise UserError(f"{unused}: --count writes the images of one run to the folder --to; leave it out")
    runs = [last_finished(run) for run in runs]
    if options.count:
        return _write_images(runs[0], user_path(options.to), options)
    files = _files(Path(runs[0]), out, options)
    return _animate(runs, files) if options.animate else _show(runs, files[0], options)


def _check_options(options: SampleOptions) -> None:
    """Raise UserError for options that exclude each other or would have no effect."""
    if bool(options.count) != bool(options.to):
        raise UserError("--count --to: use both: a number of images (at least 1) and a folder")
    check_truncation(options.truncation, "--truncation ")
    if options.label == "":
        raise UserError("--class '': expected the name of a class; to generate random classes, leave --class out")
    if options.count and options.label == EVERY_CLASS:
        raise UserError(f"--class {EVERY_CLASS}: shows one class per row of a grid; with --count, choose one class")
    given = {
        "--grid": options.grid,
        "--interpolate": options.interpolate,
        "--nearest": options.nearest,
        "--animate": options.animate,
        "--class": options.label,
        "--truncation": options.truncation != 1,
        "--data-root": options.data_root,
        "--inception": options.inception,
        "--checkpoint": options.checkpoint != "best",
    }
    allowed = set(given) if options.nearest else set(given) - {"--inception"}
    mode = ""
    if options.count:
        mode, allowed = "--count", {"--class", "--truncation", "--checkpoint"}
    elif options.animate:
        mode, allowed = "--animate", {"--animate"}
    elif options.interpolate:
        mode, allowed = "--interpolate", allowed - {"--nearest"}
    for flag in (flag for flag, value in given.items() if value and flag not in allowed):
        raise UserError(
            f"{flag}: cannot be combined with {mode}; leave one out" if mode else f"{flag}: needs --nearest"
        )


def _write_images(run: str, folder: Path, options: SampleOptions) -> int:
    """Write generated images to a folder, one file each."""
    device = choose_device("sample", options.accelerator)
    stored = read_stored(run, options.checkpoint)
    check_use(stored, "sample", run)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--to {folder}: is not an empty folder; choose a new one")
    model = Model(stored, run, device)
    index = class_index(model.recipe, model.spec, options.label, "--class ") if options.label else None
    of_class = "" if index is None else f" of class {model.classes[index]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for _ in counted(
            write_samples(model, folder, options.count, DEFAULT_ENCODING, options.label, options.truncation),
            "generating images",
            options.count,
        ):
            pass
    except OSError as error:
        raise UserError(f"--to {folder}: {error.strerror or error}") from None
    print_line(f"{options.count:,} image{'s' * (options.count != 1)}{of_class} from {model.origin} → {folder}")
    return 0


def _files(run: Path, out: str, options: SampleOptions) -> list[Path]:
    """Return the files to write: the file given by `--out`, or the default files in the run folder."""
    suffixes = ANIMATED_SUFFIXES if options.animate else (".png",)
    is_file = is_weights_file(str(run))
    if not run.exists():
        raise UserError(f"{run}: {NOT_FOUND}")
    check_not_file(str(run))
    if is_file and (options.animate or not out):
        what = "--animate: shows the images saved during training" if options.animate else "--out: missing"
        raise UserError(f"{what}; {run} is a weights file: use {'its run folder' if options.animate else '--out FILE'}")
    if not out:
        return [run / f"{options.kind}{suffix}" for suffix in suffixes]
    file = user_path(out)
    if file.suffix.lower() not in suffixes:
        raise UserError(f"--out {out}: expected a file name ending in {' or '.join(suffixes)}")
    check_creatable(file, "--out")
    return [file]


def _animate(runs: list[str], files: list[Path]) -> int:
    frames = animation_frames(runs)
    for file in files:
        with new_file(file) as temporary:
            save_animation(frames, temporary, file.suffix)
    print_line(f"{len(frames)} frames → {', '.join(map(str, files))}")
    return 0


def _show(runs: list[str], file: Path, options: SampleOptions) -> int:
    rows, columns = _parse_grid(options.grid or DEFAULT_GRID)
    if options.nearest and columns < 2:
        raise UserError(f"--grid {options.grid}: --nearest needs at least 2 columns")
    grid_options = GridOptions(
        rows,
        columns,
        options.interpolate,
        options.flag,
        options.label or "",
        options.truncation,
        options.nearest,
        options.data_root,
    )
    flags: dict[str, SettingValue] = {"gpus": "", "devices": 1}
    flags |= {"accelerator": options.accelerator} if options.accelerator else {}
    flags |= {"inception": options.inception} if options.inception else {}
    flags |= {"data_root": options.data_root} if options.data_root else {}
    # The other folders in the run's settings belong to the old place of the data.
    moved = Inherited(dict.fromkeys(FOLDERS, "") if options.data_root else {})
    activity("generating the images")
    shown = []
    for run in runs:
        try:
            config = checked(config_of(run, [("flag", moved), ("flag", flags)]))
            shown.append(show_run(run, config, options.checkpoint, grid_options))
        except UserError as error:
            if len(runs) == 1 or run in str(error):
                raise
            raise UserError(f"{run}: {error}") from None
    whole = shown[0][0] if len(shown) == 1 else side_by_side([captioned(*one) for one in shown])
    with new_file(file) as temporary:
        whole.save(temporary, format="PNG")
    print_line(f"{'; '.join(caption for _, caption in shown)} → {file}")
    return 0


def _parse_grid(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)\s*[x×]\s*(\d+)", text.strip().lower())
    rows, columns = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 0 < rows * columns <= LARGEST_GRID:
        raise UserError(f"--grid {text}: expected rows and columns like 8x8, at most {LARGEST_GRID:,} images")
    return rows, columns
