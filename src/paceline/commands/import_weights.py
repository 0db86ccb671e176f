"""`paceline import`: networks of other projects as a weights file of ours, without running code of theirs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from paceline.commands.configure import configure
from paceline.config.resolve import Config
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.data.panel_names import PanelSettings, output_panels
from paceline.inference.image_model import make_image_model
from paceline.inference.trained import Stored, build
from paceline.models.torch_file import read_torch_file
from paceline.recipes.importers.deepliif import networks_of, renamed
from paceline.recipes.importers.srgan import read_generator
from paceline.runs.weights_file import SUFFIX, write_weights

RECIPES = ("super_resolution", "translation")
PART = "generator."  # before the names of a generator's tensors, where a file holds other networks, too
CROP_PX = {"super_resolution": 96, "translation": 512}  # facts want a size; what is applied may have any


class Imported(NamedTuple):
    """Networks from elsewhere, and what they are here."""

    config: Config
    spec: DataSpec
    tensors: dict[str, Tensor]
    recognised: tuple[str, ...] = ()  # the settings that follow from the tensors


def import_weights(words: list[str], recipe: str, out: str, preset: str, assignments: list[str]) -> int:
    """Writes a weights file that `apply`, `export` and `--init-from` take."""
    if recipe not in RECIPES:
        raise UserError(f"--recipe {recipe}: weights are imported for {' and '.join(RECIPES)} alone")
    target = Path(out).expanduser()
    if target.suffix != SUFFIX:
        raise UserError(f"--out {out}: expected a name that ends in {SUFFIX}")
    flags = {"preset": preset} if preset else {}
    read = _super_resolution if recipe == "super_resolution" else _translation
    config, spec, tensors, recognised = read(words, flags, assignments)
    make_image_model(Stored(config, spec, tensors, out), words[0])  # refuses what does not fit
    write_weights(target, config, spec, tensors)
    count = sum(tensor.numel() for tensor in tensors.values())
    networks = sorted({_network(key) for key in tensors})
    print(f"{', '.join(networks)}: {len(tensors)} tensors, {count:,} numbers → {target}")
    if recognised:
        found = ", ".join(f"{name}={getattr(config.recipe, name)}" for name in recognised)
        print(f"recognised {found}; output={config.recipe.output}, which no file says")
    print(f"try: paceline apply {target} PICTURES --out made")
    return 0


def _super_resolution(words: list[str], flags: dict[str, Any], assignments: list[str]) -> Imported:
    """The generator of an SRGAN; its settings follow from its tensors."""
    if len(words) != 1:
        raise UserError(f"import: super_resolution has one network, and {len(words)} files are named")
    found = read_generator(_read(Path(words[0]).expanduser()), words[0])
    # What a person says comes last, and must agree with the file where the file knows.
    config = configure(
        "super_resolution",
        flags,
        assignments=[*(f"{name}={value}" for name, value in found.settings.items()), *assignments],
        elsewhere=True,
    )
    recognised = tuple(name for name in found.settings if name != "output")  # which leaves no trace in tensors
    for name in recognised:
        said, value = getattr(config.recipe, name), found.settings[name]
        if str(said) != str(value):
            raise UserError(f"{name}={said}: {words[0]} has {name}={value}")
    side = CROP_PX["super_resolution"]
    return Imported(config, DataSpec(found.channels, side, side), found.tensors, recognised)


def _translation(words: list[str], flags: dict[str, Any], assignments: list[str]) -> Imported:
    """Networks of pix2pix or DeepLIIF, one file each; `panels` names what they make."""
    files = {path.name: path for word in words for path in _files(Path(word).expanduser())}
    places = networks_of(files)
    if not places:
        raise UserError(f"{words[0]}: has no files like latest_net_G.pth or latest_net_G1.pth")
    config = configure("translation", flags, assignments=assignments, elsewhere=True)
    row = config.run.panels if isinstance(config.run, PanelSettings) else ""
    panels = output_panels(name.strip() for name in row.split(",") if name.strip())
    if not panels:
        raise UserError("--set panels: name what the networks make, e.g. --set panels=image,dapi,segmentation")
    side = config.run.crop or CROP_PX["translation"]
    spec = DataSpec(config.run.channels or 3, side, side, panels=panels)
    own = build(config, spec).state_dict()
    tensors: dict[str, Tensor] = {}
    for name, network in places.items():
        for key, tensor in renamed(network, _read(files[name]), own).items():
            if key not in own or own[key].shape != tensor.shape:
                has = f"is {tuple(own[key].shape)}" if key in own else "does not exist"
                raise UserError(
                    f"{files[name]}: {key.removeprefix(network + '.')} is {tuple(tensor.shape)} and {has} in "
                    f"{network} here; choose its architecture with --set (generator, norm, dropout, padding, ngf)"
                )
            tensors[key] = tensor
    return Imported(config, spec, tensors)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.glob("*.pth"))
    if not path.is_file():
        raise UserError(f"{path}: no such file or folder")
    return [path]


def _read(path: Path) -> Mapping[str, Tensor]:
    """The state_dict in a file of torch; nothing in it is executed."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    content = _unpacked(read_torch_file(path, str(path)))
    if not isinstance(content, dict) or not content:
        raise UserError(f"{path}: holds no state_dict")
    for key, value in content.items():
        if not isinstance(value, Tensor):
            raise UserError(f"{path}: {key!r} is no tensor; expected a state_dict, or one under 'generator'")
        if value.is_floating_point() and not value.isfinite().all():
            raise UserError(f"{path}: {key} holds NaN or infinite numbers; such a network makes no pictures")
    return content


def _unpacked(content: Any) -> Any:
    """The generator in what was saved: alone, under its name, or in a checkpoint of Lightning."""
    for name in ("state_dict", "generator"):
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            content = content[name]
    if isinstance(content, dict) and any(str(key).startswith(PART) for key in content):
        return {key.removeprefix(PART): value for key, value in content.items() if str(key).startswith(PART)}
    return content


def _network(key: str) -> str:
    first, second, *_ = key.split(".")
    return f"{first}.{second}" if first in ("generators", "discriminators") else first
