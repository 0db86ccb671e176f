"""`paceline import` and `paceline export`: weights from other projects, without running their code, and to ONNX."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import suppress

from paceline.commands.configure import configure
from paceline.config.resolve import Config
from paceline.contracts.importer import Importer
from paceline.contracts.recipe import Recipe, single_networks
from paceline.core.errors import UserError, install_extra
from paceline.core.files import SAFETENSORS, check_creatable, check_new_file, new_file, user_path
from paceline.core.registry import load_class, load_classes
from paceline.core.terminal import activity
from paceline.core.text import print_line
from paceline.inference.export import explaining_failures, largest_difference, make_exportable, write_onnx
from paceline.inference.trained import NO_BLEND, Blend, StoredModel, build, main_use, open_trained, read_blended
from paceline.runs.finished_run import last_finished
from paceline.runs.recipe import load_recipe
from paceline.runs.record import CONFIG
from paceline.runs.weights import is_weights_file, stored_settings, write_weights

ANY_NETWORK = "recognised"  # the importer that is used if the user gives no recipe
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
TOLERANCE = 1e-4  # largest allowed difference for values in [-1, 1]; about 1/78 of an 8-bit level


def import_weights(files: list[str], recipe: str, out: str, preset: str, assignments: list[str]) -> int:
    """Write a weights file that `apply` or `predict`, `export` and `--init-from` accept; `recipe` may be empty."""
    target = user_path(out)
    if target.suffix != SAFETENSORS:
        raise UserError(f"--out {out}: expected a file name ending in {SAFETENSORS}")
    check_creatable(target, "--out")
    _check_not_ours(files)
    importer, recipe = _open(files, recipe)
    if importer.recipe not in ("", recipe):
        raise UserError(f"--recipe {recipe}: {files[0]} belongs to the recipe {importer.recipe}; leave --recipe out")
    found = {**importer.recognised, **importer.assumed}
    config = configure(
        recipe,
        found | ({"preset": preset} if preset else {}),
        assignments=assignments,  # the user's values override those found in the files
        elsewhere=True,
    )
    _check_recognised(importer, config, files[0])
    spec = importer.data_spec(config.values())
    built = build(config, spec)
    tensors = importer.tensors(built.state_dict())
    stored = StoredModel(config, spec, tensors, out)
    open_trained(stored, files[0])  # raises if a tensor is missing or does not fit
    write_weights(target, config, spec, tensors)
    networks = [name for name in single_networks(built) if any(key.startswith(f"{name}.") for key in tensors)]
    count = sum(tensor.numel() for tensor in tensors.values())
    print_line(f"{', '.join(networks)}: {len(tensors)} tensors, {count:,} values → {target}")
    _print_settings(importer, config)
    use = main_use(stored, "import", out)
    print(f"try: paceline {use} {target} IMAGES{' --out results' if use == 'apply' else ''}")
    return 0


def _open(files: Sequence[str], recipe: str) -> tuple[Importer, str]:
    """Return the importer of a recipe or, if none is given, the first importer that recognises the files."""
    paths = [user_path(file) for file in files]
    if recipe:
        return _importer_of(recipe)(paths), recipe
    try:
        importer = load_class("importer", ANY_NETWORK, Importer)(paths)
        return importer, importer.recipe
    except UserError as problem:
        for name, owner in load_classes("recipe", Recipe).items():
            with suppress(UserError):
                if owner.weights.importer and (found := _importer_of(name)).tries_any_file:
                    return found(paths), name
        raise problem


def _check_not_ours(files: Sequence[str]) -> None:
    """Raise UserError if a file was written by Paceline, so that it needs no import."""
    for file in files:
        if (user_path(file) / CONFIG).is_file():
            raise UserError(f"{file}: is a run folder, which needs no import; use it as it is, e.g. --init-from {file}")
        if not is_weights_file(file):
            continue
        found = ""
        with suppress(UserError):  # the importer reports a damaged file
            found, _ = stored_settings(user_path(file))
        if found:
            what = f"is a weights file of Paceline (recipe {found}), which needs no import"
            raise UserError(f"{file}: {what}; use it as it is, e.g. --init-from {file}")


def _importer_of(recipe: str) -> type[Importer]:
    """Return a recipe's importer; raise UserError if the recipe has none."""
    name = load_recipe(recipe).weights.importer
    if not name:
        others = [other for other, found in load_classes("recipe", Recipe).items() if found.weights.importer]
        raise UserError(f"--recipe {recipe}: has no importer; recipes with an importer: {', '.join(others)}")
    return load_class("importer", name, Importer)


def _check_recognised(importer: Importer, config: Config, file: str) -> None:
    """Raise UserError if the user's settings contradict those recognised in the files."""
    for name, value in importer.recognised.items():
        chosen = config.values()[name]
        if str(chosen) != str(value):
            raise UserError(f"{name}={chosen}: {file} has {name}={value}; leave --set {name} out")


def _print_settings(importer: Importer, config: Config) -> None:
    for verb, settings in (("recognised", importer.recognised), ("assumed (not stored in the file)", importer.assumed)):
        if settings:
            print_line(f"{verb}: {', '.join(f'{name}={config.values()[name]}' for name in settings)}")


def export(path: str, out: str, checkpoint: str, *, overwrite: bool = False, blend: Blend = NO_BLEND) -> int:
    """Write the ONNX file, run the exported model, and print how much its results differ from PyTorch's."""
    target = check_new_file(out, (".onnx",), overwrite=overwrite)
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"export needs {', '.join(missing)}; install with: {install_extra('export')}")
    path = last_finished(path)
    stored = read_blended(path, checkpoint, blend)
    exportable = make_exportable(stored, path)
    with new_file(target) as temporary, explaining_failures(path):
        activity("exporting the network to ONNX")
        write_onnx(exportable, temporary)
        activity("comparing the ONNX model's results with PyTorch's")
        difference = largest_difference(exportable, temporary, path)
        if not difference <= TOLERANCE:
            raise UserError(
                f"--out {out}: not written, because the exported model's results differ from PyTorch's by "
                f"{difference:.1e}, which is more than the allowed {TOLERANCE:.0e}"
            )
    print_line(f"{stored.config.recipe_name} from {stored.origin} → {target} ({target.stat().st_size / 1e6:.1f} MB)")
    print_line(exportable.usage)
    print_line(f"largest difference from PyTorch: {difference:.1e}")
    return 0
