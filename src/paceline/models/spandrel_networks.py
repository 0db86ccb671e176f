"""Restoration and super-resolution networks from spandrel: `network=spandrel:NAME`.

The recipe and the data determine the channels, the scale and the image size. spandrel describes each network: the
image sizes that it accepts, and how it is called.
"""

from __future__ import annotations

import importlib
import inspect
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from spandrel import MAIN_REGISTRY, Architecture, ImageModelDescriptor, canonicalize_state_dict
from torch import Tensor, nn

from paceline.core.errors import UserError
from paceline.core.types import SettingValue
from paceline.models.layers import fuse_channel_norms, in_full_precision
from paceline.models.networks import NetworkChoice, NetworkTask, RecognisedNetwork, run_copy

PROVIDER = "spandrel"
IN_CHANNELS = ("in_nc", "in_chans", "num_in_ch", "in_channels", "in_ch", "inp_channels", "img_channel", "n_colors")
MORE_IN_CHANNELS = ("dd_in",)  # Uformer's second name for the number of input channels
OUT_CHANNELS = ("out_nc", "num_out_ch", "out_channels", "out_ch")
SCALES = ("scale", "upscale", "upscale_factor", "up_scale", "upscaling_factor")
SIZES = ("img_size", "input_resolution")
WINDOWS = ("window_size", "win_size", "split_size")  # the training size is rounded up to a multiple of them
UNSHUFFLES = ("shuffle_factor", "start_unshuffle")  # the network first reduces the image by this factor
UPSAMPLER = "upsampler"
RESERVED = {
    **dict.fromkeys((*IN_CHANNELS, *MORE_IN_CHANNELS, *OUT_CHANNELS), "the data determines it"),
    **dict.fromkeys(SCALES, "use --set scale=N"),
    **dict.fromkeys(SIZES, "the size of the training images determines it; use --crop PIXELS"),
}
# Defaults where the class has none, or where its default is unsuitable: a NAFNet without blocks, and windows of 7
# pixels, which do not fit common crops.
DEFAULTS: dict[str, dict[str, SettingValue]] = {
    "NAFNet": {"width": 32, "enc_blk_nums": [2, 2, 4, 8], "middle_blk_num": 12, "dec_blk_nums": [2, 2, 2, 2]},
    "SwinIR": {"window_size": 8},
    "Swin2SR": {"window_size": 8},
    "HAT": {"window_size": 16},
    "SAFMN": {"dim": 36},
    "SAFMN_BCIE": {"dim": 32},
}
# The smallest image size to build a network for. With less, the innermost windows are not shifted, or are smaller.
MIN_SIZES = {"Uformer": 256}
# Stochastic depth would make the result depend on the number of devices. Files do not store its rate.
NOT_IN_FILES = {"drop_path_rate": 0.0}
_FACES = "restores aligned photographs of faces in several stages"
UNSUPPORTED = {
    "GFPGAN": _FACES,
    "RestoreFormer": _FACES,
    "DRUNet": "needs a map of the noise level in addition to the image",
    "LaMa": "needs a mask in addition to the image",
    "AuraSR": "needs random noise in addition to the image",
    "IPT": "divides images into patches of a fixed size itself",
}
CHECKED_PX = 64  # side of the image on which an imported network is compared with spandrel's


class _Entry(NamedTuple):
    architecture: Architecture[nn.Module]
    network_class: type[nn.Module]

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        found = dict(inspect.signature(self.network_class.__init__).parameters)
        found.pop("self")
        return found

    def defaults(self) -> dict[str, Any]:
        declared = {name: one.default for name, one in self.parameters.items() if one.default is not one.empty}
        ours = {name: value for name, value in NOT_IN_FILES.items() if name in declared}
        return {**declared, **ours, **DEFAULTS.get(self.network_class.__name__, {})}


def make_network(choice: NetworkChoice, task: NetworkTask) -> nn.Module:
    """Return a network with random weights for images in [-1, 1]."""
    entry = _find(choice)
    choice.check_reserved({name: advice for name, advice in RESERVED.items() if name in entry.parameters})
    network = _build(choice, entry, task)
    try:
        used = used_parameters(network, (2, task.in_channels, task.height, task.width))
    except Exception as error:
        advice = "use larger images or other network_args"
        raise choice.failed(f"cannot process images of {task.width}×{task.height} pixels", error, advice) from None
    for name, parameter in network.named_parameters():
        if name not in used:
            parameter.requires_grad_(False)
    return network


def recognise(state: Mapping[str, Tensor], path: str) -> RecognisedNetwork | None:
    """Return the network that weights belong to, or None if spandrel does not recognise them."""
    state = {name: value.float() if value.is_floating_point() else value for name, value in state.items()}
    descriptor = _describe_file(canonicalize_state_dict(state), path)
    if descriptor is None:
        return None
    name, entry = next(
        (name, entry) for name, entry in _networks().items() if entry.network_class is type(descriptor.model)
    )
    given, defaults = descriptor.model.hyperparameters, entry.defaults()
    arguments = {
        argument: list(value) if isinstance(value, tuple) else value
        for argument, value in given.items()
        if argument not in RESERVED and argument not in NOT_IN_FILES and value != defaults.get(argument)
    }
    choice = NetworkChoice(f"{PROVIDER}:{name}", arguments)
    channels, scale = descriptor.input_channels, descriptor.scale
    if descriptor.output_channels != channels:
        raise UserError(
            f"{path}: its network ({name}) maps {channels} channels to {descriptor.output_channels}; "
            "use a network with the same number of channels in its input and its output"
        )
    task = NetworkTask(channels, CHECKED_PX, CHECKED_PX, out_channels=channels, scale=scale)
    with torch.random.fork_rng(devices=[]):
        ours = make_network(choice, task)
        assert isinstance(ours, UnitRangeNetwork)
        theirs = UnitRangeNetwork(descriptor.model, descriptor)
    ours.load_state_dict(theirs.state_dict())
    _check_same(ours, theirs, channels, path)
    return RecognisedNetwork(choice.name, arguments, channels, scale, theirs.state_dict())


@cache
def _networks() -> dict[str, _Entry]:
    """Return the networks by name: the architecture's name or, if an architecture has several classes, the class's."""
    found: dict[str, _Entry] = {}
    for support in MAIN_REGISTRY:
        architecture = support.architecture
        module = importlib.import_module(f"spandrel.architectures.{architecture.id}")
        exported = [getattr(module, name) for name in module.__all__]
        classes = [one for one in exported if isinstance(one, type) and issubclass(one, nn.Module)]
        for one in classes:
            name = architecture.id if len(classes) == 1 else one.__name__
            found[name] = _Entry(architecture, one)
    return found


def _find(choice: NetworkChoice) -> _Entry:
    """Return an architecture; raise UserError if it does not exist or cannot be used."""
    name = choice.architecture
    if name not in _networks():
        raise choice.unknown([name for name in _networks() if name not in UNSUPPORTED])
    if name in UNSUPPORTED:
        raise UserError(f"network={choice.name}: {UNSUPPORTED[name]}, which is not supported; choose another network")
    return _networks()[name]


def _build(choice: NetworkChoice, entry: _Entry, task: NetworkTask) -> UnitRangeNetwork:
    """Return the network with the task's channels and scale, whatever the architecture calls these arguments."""
    problem: UserError | None = None
    for fixed in _fitted(choice, entry, task):
        try:
            network, descriptor = _described(choice, entry, {**entry.defaults(), **choice.arguments, **fixed})
        except UserError as error:
            problem = problem or error
            continue
        made = descriptor.input_channels, descriptor.output_channels, descriptor.scale
        if made == (task.in_channels, task.out_channels, task.scale):
            return UnitRangeNetwork(fuse_channel_norms(network), descriptor)
        problem = problem or UserError(
            f"network={choice.name}: maps {made[0]} to {made[1]} channels at scale {made[2]}, "
            f"but this run needs {task.in_channels} to {task.out_channels} channels at scale {task.scale}; "
            "choose another network or other network_args"
        )
    assert problem is not None
    raise problem


def _described(
    choice: NetworkChoice, entry: _Entry, arguments: Mapping[str, Any]
) -> tuple[nn.Module, ImageModelDescriptor[nn.Module]]:
    """Return a network with these arguments, and spandrel's description of a network with such weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some constructors call functions of torch that are deprecated
        network = choice.build(partial(entry.network_class, **arguments))
        try:
            with torch.random.fork_rng(devices=[]):
                descriptor = entry.architecture.load(dict(network.state_dict()))
        except Exception as error:
            raise choice.failed(
                "spandrel does not recognise this network", error, "change network_args or choose a different network"
            ) from None
    assert isinstance(descriptor, ImageModelDescriptor)
    return network, descriptor


def _fitted(choice: NetworkChoice, entry: _Entry, task: NetworkTask) -> Iterator[dict[str, Any]]:
    """Yield arguments for the task. Architectures count channels differently, so there are several candidates."""
    given = (choice.arguments.get(name) for name in UNSHUFFLES)
    factor = next((value for value in given if isinstance(value, int)), 1)
    own = entry.parameters
    fixed: dict[str, Any] = {name: task.out_channels for name in OUT_CHANNELS if name in own}
    fixed |= {name: task.scale * factor for name in SCALES if name in own}
    side = max(task.height, task.width, MIN_SIZES.get(entry.network_class.__name__, 0))
    side = _rounded_up(side, {**entry.defaults(), **choice.arguments})
    fixed |= {name: side for name in SIZES if name in own}
    if UPSAMPLER in own and UPSAMPLER not in choice.arguments and own[UPSAMPLER].default in ("", "pixelshuffle"):
        fixed[UPSAMPLER] = "pixelshuffle" if task.scale * factor > 1 else ""
    # Some networks count the pixels that are moved to channels as input channels.
    for in_channels in dict.fromkeys((task.in_channels, task.in_channels * factor**2)):
        yield fixed | {name: in_channels for name in (*IN_CHANNELS, *MORE_IN_CHANNELS) if name in own}


def _rounded_up(side: int, arguments: Mapping[str, Any]) -> int:
    """Return a side length rounded up to a multiple of each window into which a network divides images.

    It is at least two windows, because networks that are built for a single window do not shift their windows.
    """
    given = [arguments[name] for name in WINDOWS if name in arguments]
    sizes = [size for one in given for size in (one if isinstance(one, list | tuple) else [one])]
    multiple = math.lcm(*(size for size in sizes if isinstance(size, int) and size > 0))
    return max(math.ceil(side / multiple), 2 if multiple > 1 else 1) * multiple


def _describe_file(state: dict[str, Any], path: str) -> ImageModelDescriptor[nn.Module] | None:
    """Return spandrel's description of a network, or None if it is unknown; raise UserError if it is not supported."""
    failure = ""
    for support in MAIN_REGISTRY.architectures("detection"):
        name = str(support.architecture.id)
        if not support.detect(state):
            continue
        if name in UNSUPPORTED:
            raise UserError(f"{path}: contains {name}, which {UNSUPPORTED[name]}; this is not supported")
        try:
            descriptor = support.architecture.load(dict(state))
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            failure = failure or f"{path}: looks like {name}, but does not fit it ({type(error).__name__}: {reason})"
            continue
        assert isinstance(descriptor, ImageModelDescriptor)
        return descriptor
    if failure:
        raise UserError(f"{failure}; use an undamaged file")
    return None


def _check_same(ours: UnitRangeNetwork, theirs: UnitRangeNetwork, channels: int, path: str) -> None:
    """Raise UserError if the network with the recognised arguments computes different images from spandrel's."""
    images = torch.rand(1, channels, CHECKED_PX, CHECKED_PX, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        difference = (ours.eval()(images) - theirs.eval()(images)).abs().max()
    if not difference < 1e-4:
        raise UserError(f"{path}: the network cannot be rebuilt from its weights (results differ by {difference:.2g})")


MASK = "attn_mask"  # prefix of buffers with a mask for the training size, which networks can compute for any size
INFERENCE_ONLY = "eval_conv"  # a convolution that its module computes from other convolutions in eval mode


class UnitRangeNetwork(nn.Module):
    """Applies a network for images in [0, 1] to images in [-1, 1] of any size.

    The wrapped network is changed so that its state_dict contains trained values only: masks that depend on the image
    size and weights that serve inference only are left out.
    """

    def __init__(self, network: nn.Module, descriptor: ImageModelDescriptor[nn.Module]) -> None:
        super().__init__()
        self.network, self.scale, self._size = network, descriptor.scale, descriptor.size_requirements
        self._call = descriptor._call_fn  # runs the network and returns its image; some networks return more than that
        self._merged, self._constants = _prepare(network)

    def train(self, mode: bool = True) -> UnitRangeNetwork:
        """Select training or eval mode. Convolutions that would be merged for inference always run unmerged."""
        super().train(mode)
        for name in self._merged:
            self.network.get_submodule(name).train()
        return self

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        columns, rows = self._size.get_padding(width, height)
        padded = _pad(images * 0.5 + 0.5, rows, columns)
        owners = [(self.network.get_submodule(path), name) for path, name in self._constants]
        constants = [getattr(owner, name) for owner, name in owners]
        # Networks create masks on the default device. A copy from the host could not be captured in a CUDA graph.
        with images.device if images.is_cuda else nullcontext():
            result = self._call(self.network, padded)
        # A network may replace a constant with a copy on the device of its input, which may be a tensor without data.
        for (owner, name), constant in zip(owners, constants, strict=True):
            setattr(owner, name, constant)
        return in_full_precision(result)[..., : height * self.scale, : width * self.scale] * 2 - 1


def _pad(images: Tensor, rows: int, columns: int) -> Tensor:
    """Add reflected pixels at the bottom and at the right; if the image is too small for that, also repeat its edge."""
    if not rows and not columns:
        return images
    reflected_rows, reflected_columns = min(rows, images.shape[-2] - 1), min(columns, images.shape[-1] - 1)
    images = F.pad(images, (0, reflected_columns, 0, reflected_rows), "reflect")
    return F.pad(images, (0, columns - reflected_columns, 0, rows - reflected_rows), "replicate")


def _prepare(network: nn.Module) -> tuple[list[str], list[tuple[str, str]]]:
    """Leave everything but trained values out of the state_dict.

    Return the names of modules without the convolution that they compute from others in eval mode, and the owners and
    names of plain tensor attributes, which become buffers, so that they move with the network.
    """
    merged, constants = [], []
    for path, module in network.named_modules():
        if isinstance(getattr(module, INFERENCE_ONLY, None), nn.Module) and hasattr(module, "update_params"):
            delattr(module, INFERENCE_ONLY)
            merged.append(path)
        plain = [(name, value) for name, value in vars(module).items() if isinstance(value, Tensor)]
        masks = [(name, mask) for name, mask in module.named_buffers(recurse=False) if name.startswith(MASK)]
        for name, value in [*plain, *masks]:
            delattr(module, name)
            module.register_buffer(name, value, persistent=False)
        constants += [(path, name) for name, _ in plain]
    return merged, constants


def used_parameters(network: nn.Module, size: tuple[int, int, int, int]) -> set[str]:
    """Return the names of the parameters that the output for images of this size depends on."""
    result, copies = run_copy(network, size, train=True)
    reached = _leaves(result)
    return {name for name, tensor in copies.items() if id(tensor) in reached}


def _leaves(result: Tensor) -> set[int]:
    """Return the id() of each leaf tensor in the graph of a result."""
    leaves, seen, waiting = set[int](), set[object](), [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        waiting += [before for before, _ in node.next_functions]
    return leaves
