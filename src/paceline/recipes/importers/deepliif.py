"""Where the network files of pix2pix and DeepLIIF belong in our recipe: their names and keys, and ours.

pix2pix calls its networks G and D. DeepLIIF counts its modalities from 1 (G1, D1, …) and gives networks of the
segmentation the number after the last modality and a second one for what they see (G51 the input, G52 the first
modality), or, in its later versions, the letter S and a second one that begins with 0 (GS0 the input, and so on).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from torch import Tensor

from paceline.core.errors import UserError

FILE_NAME = re.compile(r"(?:.+_net_)?([GD])(S?)(\d*)\.pth")
GROUPS = {"G": "generators", "D": "discriminators"}
UNUSED = ("running_mean", "running_var", "num_batches_tracked")  # kept by old InstanceNorm layers, used by none


def networks_of(file_names: Iterable[str]) -> dict[str, str]:
    """For each file of a folder that holds a network, our name of that network, e.g. `generators.GS0`."""
    parsed = {name: match.groups() for name in file_names if (match := FILE_NAME.fullmatch(name))}
    numbers = {number for _, letter, number in parsed.values() if not letter}
    alone = max((int(number[0]) - 1 for number in numbers if len(number) == 2), default=1)
    num_modalities = max((int(number) for number in numbers if len(number) == 1), default=alone)
    # What is written with a letter may begin with 0 or with 1.
    first = min((int(number) for _, letter, number in parsed.values() if letter and number), default=0)
    found = {}
    for file_name, (kind, letter, number) in parsed.items():
        if letter and number:
            place = f"S{int(number) - min(first, 1)}"
        elif len(number) < 2:
            place = number or "1"
        elif number.startswith(str(num_modalities + 1)):
            place = f"S{int(number.removeprefix(str(num_modalities + 1))) - 1}"
        else:
            raise UserError(
                f"{file_name}: with {num_modalities} modalities, networks of the segmentation are called "
                f"{kind}{num_modalities + 1}1, {kind}{num_modalities + 1}2, …; are the files of one model together?"
            )
        found[file_name] = f"{GROUPS[kind]}.{kind}{place}"
    return found


def renamed(network: str, state: Mapping[str, Tensor], own: Iterable[str]) -> dict[str, Tensor]:
    """A file's tensors by our keys of a recipe, `own` being those that the recipe has."""
    known = set(own)
    result = {}
    for key, tensor in state.items():
        full = f"{network}.{key.removeprefix('module.')}"
        if full not in known and full.rpartition(".")[2] in UNUSED:
            continue
        result[full] = tensor
    return result
