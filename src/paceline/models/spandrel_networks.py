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
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from spandrel import MAIN_REGISTRY, Architecture, ImageModelDescriptor, canonicalize_state_dict
from torch import Tensor, nn

from paceline.core.errors import UserError
from paceline.core.types import SettingValue
from paceline.models.adapters import SizeRule, UnitRangeNetwork, fuse_channel_norms, used_parameters
from paceline.models.networks import NetworkChoice, NetworkTask, RecognisedNetwork

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
# Networks in the separate package spandrel_extra_arches.
RESTRICTED = ("CodeFormer", "DDColor", "FeMaSR", "M3SNet", "MAN", "MIRNet2", "MPRNet", "Restormer", "SRFormer")
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
    network.freeze_unused(used)
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
        theirs = UnitRangeNetwork(descriptor.model, descriptor._call_fn, _size_rule(descriptor))
    num_left_out = len(state) - len(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    _check_same(ours, theirs, channels, path)
    return RecognisedNetwork(choice.name, arguments, channels, scale, theirs.state_dict(), max(0, num_left_out))


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
    if name in RESTRICTED:
        raise UserError(
            f"network={choice.name}: is part of spandrel_extra_arches, whose licences restrict its use; "
            "choose a network from spandrel"
        )
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
            return UnitRangeNetwork(fuse_channel_norms(network), descriptor._call_fn, _size_rule(descriptor))
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
        network = choice.build(
            partial(entry.network_class, **arguments), lambda: entry.parameters.keys() - RESERVED.keys()
        )
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


def _size_rule(descriptor: ImageModelDescriptor[nn.Module]) -> SizeRule:
    needed = descriptor.size_requirements
    return SizeRule(descriptor.scale, needed.minimum, needed.multiple_of, needed.square)


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
