"""What must match an earlier command in order to resume its unfinished files."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.core.ordered_map import num_cores, ordered_map
from paceline.core.types import JsonObject
from paceline.images.regions.region_image import Box
from paceline.inference.applier import ApplierSettings
from paceline.inference.image_model import ImageModel
from paceline.inference.region_plan import RegionOptions
from paceline.inference.tiling import Tiling


@dataclass(frozen=True)
class Division:
    """How an image is divided. A resumed command keeps it, even if the amount of free memory differs."""

    tiling: Tiling
    channels: dict[str, int]  # of each result

    def as_json(self) -> dict[str, Any]:
        """Return the division for a journal."""
        return {"tiling": asdict(self.tiling), "channels": self.channels}


def identity_of(
    path: Path, level: int, box: Box, settings: ApplierSettings, options: RegionOptions, weights: str
) -> dict[str, Any]:
    """Return what must be equal: the image, the part of it, the weights, and what affects the results."""
    status = path.stat()
    return {
        "image": [str(path), status.st_size, status.st_mtime_ns],
        "part": [level, *box],
        "weights": weights,
        "tile": settings.tile,
        "precision": settings.precision,
        "compression": settings.encoding.compression,
        "skip_background": options.skip_background,
    }


def division_in(purpose: JsonObject | None, identity: dict[str, Any]) -> Division | None:
    """Return the division in a journal, if its file was for the same results."""
    if purpose is None or any(purpose.get(key) != value for key, value in identity.items()):
        return None
    found: dict[str, Any] = {**purpose}
    try:
        tiling = Tiling(**found["tiling"])
        window = (int(tiling.window_px[0]), int(tiling.window_px[1])) if tiling.window_px else None
        whole = Tiling(tiling.side_px, tiling.halo_px, tiling.note, window, tiling.multiple_px)
        channels = {str(name): int(count) for name, count in found["channels"].items()}
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        return None
    return Division(whole, channels) if min(whole.side_px, whole.multiple_px) > 0 else None


def weights_digest(image_model: ImageModel) -> str:
    """Return a SHA-256 checksum of the checksums of a model's weights, which are computed on all cores."""

    def checksum(item: tuple[str, Tensor]) -> bytes:
        name, tensor = item
        digest = hashlib.sha256(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.digest()

    tensors = image_model.recipe.state_dict().items()
    return hashlib.sha256(b"".join(ordered_map(checksum, tensors, num_cores()))).hexdigest()
