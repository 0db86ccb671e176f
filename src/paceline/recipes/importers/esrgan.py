"""Importer for ESRGAN and Real-ESRGAN generators (RRDBNet), with the three public ways to name their tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from paceline.contracts.data_spec import DataSpec
from paceline.contracts.importer import Importer, only_path
from paceline.core.errors import UserError
from paceline.core.types import SettingValue
from paceline.models.networks import first_keys
from paceline.models.torch_file import read_state_dict

SUPPORTED = "--recipe esrgan reads ESRGAN and Real-ESRGAN generators"
CROP_PX = 128  # image size in the data spec; the network accepts images of any size
SCALES = {1: "4", 4: "2"}  # the scale for each ratio of the first layer's inputs to the image's channels
# Patterns of the older names, with their replacements.
OLDER_NAMES = (
    (r"(?:RRDB_trunk|model\.1\.sub)\.(\d+)\.RDB(\d)\.conv(\d)\.(?:0\.)?", r"body.\1.rdb\2.conv\3."),
    (r"(?:trunk_conv|model\.1\.sub\.\d+)\.", "conv_body."),
    (r"model\.0\.", "conv_first."),
    (r"(?:upconv1|model\.3)\.", "conv_up1."),
    (r"(?:upconv2|model\.6)\.", "conv_up2."),
    (r"(?:HRconv|model\.8)\.", "conv_hr."),
    (r"model\.10\.", "conv_last."),
)
OUTSIDE_BODY = {"conv_first", "conv_body", "conv_up1", "conv_up2", "conv_hr", "conv_last"}
BLOCK = re.compile(r"body\.(\d+)\.rdb[123]\.conv[1-5]\.(?:weight|bias)")


class EsrganFile(Importer):
    """An RRDBNet. Its settings are inferred from its tensors."""

    tries_any_file = True

    def __init__(self, paths: Sequence[Path]) -> None:
        path = only_path(paths, "an ESRGAN generator")
        state = read_state_dict(path)
        found = {_current_name(key): tensor for key, tensor in state.items()}
        blocks = {int(match[1]) for match in map(BLOCK.fullmatch, found) if match}
        strange = [key for key in found if not BLOCK.fullmatch(key) and key.rpartition(".")[0] not in OUTSIDE_BODY]
        missing = sorted(name for name in OUTSIDE_BODY if f"{name}.weight" not in found)
        if not blocks or strange or missing:
            what = f"{strange[0]!r} does not belong to" if strange else "a tensor is missing from"
            raise UserError(f"{path}: {what} an ESRGAN generator {first_keys(state)}; {SUPPORTED}")
        first, last = found["conv_first.weight"], found["conv_last.weight"]
        self.channels = last.shape[0]
        ratio, rest = divmod(first.shape[1], self.channels)
        if rest or ratio not in SCALES:
            raise UserError(
                f"{path}: its first layer has {first.shape[1]} input channels for images with {self.channels} "
                "channels: the scale is neither 2 nor 4; use a generator for ×2 or ×4"
            )
        self.generator = {f"generator.{key}": tensor for key, tensor in found.items()}
        self.recognised = {
            "scale": SCALES[ratio],
            "num_blocks": len(blocks),
            "width": first.shape[0],
            "growth": found["body.0.rdb1.conv1.weight"].shape[0],
        }

    def data_spec(self, settings: Mapping[str, SettingValue]) -> DataSpec:
        return DataSpec(self.channels, CROP_PX, CROP_PX)

    def tensors(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.generator


def _current_name(key: str) -> str:
    """Return the name of a tensor in RRDBNet, given its name in any of the public layouts."""
    for pattern, replacement in OLDER_NAMES:
        renamed, count = re.subn(f"^{pattern}", replacement, key)
        if count:
            return renamed
    return key
