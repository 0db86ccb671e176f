"""Finds the training images that are most similar to generated images, to see whether a generator copies them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.settings import RunSettings
from paceline.core.activity import Counter
from paceline.core.errors import UserError
from paceline.data.source import Source, has_one_size, sizes_of
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

    def training_images(part: NDArray[np.int64]) -> NDArray[np.uint8]:
        return to_eight_bit_array(source.read_many(part)["image"], source.spec.pixel_format)

    own = features(images)
    distances = torch.full((len(images), count), float("inf"), dtype=torch.float64, device=device)
    indices = torch.zeros(len(images), count, dtype=torch.int64, device=device)
    with torch.no_grad(), Counter("comparing with the training images", len(source)) as counter:
        for start in range(0, len(source), IMAGES_AT_ONCE):
            part = np.arange(start, min(start + IMAGES_AT_ONCE, len(source)))
            found = torch.cdist(own, features(training_images(part)))
            every = torch.cat([distances, found], dim=1)
            numbers = torch.cat([indices, torch.from_numpy(part).to(device).expand(len(images), -1)], dim=1)
            distances, chosen = every.topk(count, dim=1, largest=False)
            indices = numbers.gather(1, chosen)
            counter.update(int(part[-1]) + 1)
    rows = [
        np.concatenate([image[None], training_images(near)])
        for image, near in zip(images, indices.cpu().numpy(), strict=True)
    ]
    return np.concatenate(rows)
