"""Finds the training images that are most similar to generated images, to see whether a generator copies them.

If training flips images, their mirror images are compared, too: a generator may copy these.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.settings import RunSettings
from paceline.core.activity import Counter
from paceline.core.errors import UserError
from paceline.data.source import Source, has_one_size, sizes_of
from paceline.data.transforms import Augment
from paceline.evaluation.features.choice import choose_features
from paceline.images.deep_image import to_eight_bit_array
from paceline.runs.finished_run import open_run

IMAGES_AT_ONCE = 500


def with_nearest(
    images: NDArray[np.uint8], source: Source, count: int, settings: RunSettings, device: torch.device
) -> NDArray[np.uint8]:
    """Return each uint8 [h, w, c] image followed by the `count` training images with the nearest features.

    `source` contains at least `count` images.
    """
    if not has_one_size(source) or tuple(sizes_of(source)[0]) != images.shape[1:3]:
        raise UserError(f"--nearest: the run trains on crops of the images in {settings.data}; leave --nearest out")
    network = choose_features(settings, source.spec, device, open_run)

    def features(some: NDArray[np.uint8]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(some)).to(device).permute(0, 3, 1, 2)
        return network(tensor, "fp32").vectors.double()

    def training_images(numbers: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return images by number: first all training images, then their mirror images."""
        found = to_eight_bit_array(source.read_many(numbers % len(source))["image"], source.spec.pixel_format)
        return np.where((numbers < len(source))[:, None, None, None], found, found[:, :, ::-1])

    own = features(images)
    distances = torch.full((len(images), count), float("inf"), dtype=torch.float64, device=device)
    chosen = torch.zeros(len(images), count, dtype=torch.int64, device=device)
    num_variants = 2 if Augment.from_settings(settings, source.spec).flip else 1
    with torch.no_grad(), Counter("comparing with the training images", len(source)) as counter:
        for start in range(0, len(source), IMAGES_AT_ONCE):
            end = min(start + IMAGES_AT_ONCE, len(source))
            numbers = [np.arange(start, end) + variant * len(source) for variant in range(num_variants)]
            found = torch.stack([torch.cdist(own, features(training_images(part))) for part in numbers])
            nearer = found.min(dim=0)  # of an image and its mirror image
            which = torch.from_numpy(np.stack(numbers)).to(device).gather(0, nearer.indices)
            distances, best = torch.cat([distances, nearer.values], dim=1).topk(count, dim=1, largest=False)
            chosen = torch.cat([chosen, which], dim=1).gather(1, best)
            counter.update(end)
    rows = [
        np.concatenate([image[None], training_images(near)])
        for image, near in zip(images, chosen.cpu().numpy(), strict=True)
    ]
    return np.concatenate(rows)
