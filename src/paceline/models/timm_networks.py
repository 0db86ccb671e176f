"""Classifiers from timm (PyTorch Image Models): `network=timm:NAME`.

The data determines the number of classes, the channels and, if the architecture has a fixed input size, the image size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import timm
from timm.models import PretrainedCfg, get_pretrained_cfg
from torch import Tensor, nn

from paceline.core.errors import UserError
from paceline.core.types import SettingValue
from paceline.models.networks import NetworkChoice, NetworkTask, first_keys, run_copy

create_model: Callable[..., nn.Module] = timm.create_model  # the arguments are checked when it is called
PRETRAINED = "pretrained"  # requests timm's published weights; see `make_pretrained`
_FROM_DATA = "the data determines it"
_FROM_FILE = "use --init-from FILE"
RESERVED = {
    "num_classes": _FROM_DATA,
    "in_chans": _FROM_DATA,
    "img_size": f"{_FROM_DATA}; use --set size=PIXELS",
    "checkpoint_path": _FROM_FILE,
    "pretrained_cfg": "use --set network=timm:NAME.TAG to choose published weights",
    "pretrained_cfg_overlay": _FROM_FILE,
    "cache_dir": "set the environment variable HF_HOME",
    **dict.fromkeys(("device", "dtype"), "use --accelerator and --precision"),
    **dict.fromkeys(("features_only", "scriptable", "exportable", "no_jit"), "leave it out"),
}


def make_network(choice: NetworkChoice, task: NetworkTask) -> nn.Module:
    """Return a classifier with random weights."""
    arguments = _checked(choice, task)
    network = _create(choice, {**arguments, "num_classes": task.num_classes, **_input(choice, task)})
    check_input(network, choice, task)
    return network


def make_pretrained(choice: NetworkChoice, task: NetworkTask, weights: dict[str, Tensor] | None) -> nn.Module:
    """Return a classifier with timm's published weights, or with `weights` from a file that timm or a user wrote.

    timm adapts the first layer to the channels and the position embeddings to the image size. If the number of classes
    differs, the last layer is new.
    """
    arguments = {**_checked(choice, task), **_input(choice, task), PRETRAINED: True}
    network = _download(choice, arguments) if weights is None else _load(choice, arguments, weights)
    if network.num_classes != task.num_classes:
        network.reset_classifier(task.num_classes)  # type: ignore[operator]
    return network


def describe_weights(choice: NetworkChoice, weights: Mapping[str, Tensor], size_px: int) -> NetworkTask:
    """Return the task that weights are for; `size_px` is the image size in pixels, or 0 for the one timm uses."""
    _check_architecture(choice)
    config = _config(choice)
    channels, height, width = config.input_size
    first = _first(config.first_conv)
    if f"{first}.weight" in weights:
        channels = weights[f"{first}.weight"].shape[1]
    num_classes = _num_classes(choice, weights)
    if not num_classes:
        last = _first(config.classifier)
        raise UserError(
            f"network={choice.name}: the file has no weights for the last layer, {last!r} {first_keys(weights)}; "
            "choose the network that the weights belong to, or use weights without a last layer with --init-from"
        )
    return NetworkTask(channels, size_px or height, size_px or width, num_classes=num_classes)


def input_statistics(choice: NetworkChoice) -> tuple[Sequence[float], Sequence[float]]:
    """Return the mean and standard deviation that timm normalises images with."""
    _check_architecture(choice)
    config = _config(choice)
    return config.mean, config.std


def _checked(choice: NetworkChoice, task: NetworkTask) -> dict[str, SettingValue]:
    """Return the arguments for the architecture; raise UserError for unknown names and unsuitable tasks."""
    if not task.num_classes:
        raise UserError(
            f"network={choice.name}: is a classifier; this recipe needs a network that maps images to images"
        )
    _check_architecture(choice)
    choice.check_reserved(RESERVED)
    if not isinstance(choice.arguments.get(PRETRAINED, False), bool):
        raise UserError(f"network_args.{PRETRAINED}={choice.arguments[PRETRAINED]}: expected true or false")
    return {name: value for name, value in choice.arguments.items() if name != PRETRAINED}


def _check_architecture(choice: NetworkChoice) -> None:
    """Raise UserError if timm has no such architecture, or no weights for the tag after the dot."""
    architecture, _, tag = choice.architecture.partition(".")
    if not timm.is_model(architecture):  # also rejects names such as local-dir:PATH, which would load files
        raise choice.unknown(timm.list_models())
    tags = [name.partition(".")[2] for name in timm.list_pretrained(f"{architecture}.*")]
    if tag and tag not in tags:
        known = f"tags with published weights: {', '.join(tags)}" if tags else "leave the tag out"
        raise UserError(f"network={choice.name}: timm has no weights {tag!r} for {architecture}; {known}")


def _config(choice: NetworkChoice) -> PretrainedCfg:
    """Return timm's description of an architecture: input size, mean, names of the first and last layer."""
    return get_pretrained_cfg(choice.architecture) or PretrainedCfg()


def _input(choice: NetworkChoice, task: NetworkTask) -> dict[str, object]:
    """Return the arguments for the channels and, for an architecture with a fixed input size, the image size."""
    is_fixed = _config(choice).fixed_input_size
    return {"in_chans": task.in_channels, **({"img_size": (task.height, task.width)} if is_fixed else {})}


def _create(choice: NetworkChoice, arguments: Mapping[str, object]) -> nn.Module:
    return choice.build(lambda: create_model(choice.architecture, **arguments))


def _download(choice: NetworkChoice, arguments: Mapping[str, object]) -> nn.Module:
    if not timm.is_model_pretrained(choice.architecture):
        raise UserError(f"network_args.{PRETRAINED}=true: timm has no published weights for {choice.architecture}")
    try:
        return create_model(choice.architecture, **arguments)
    except Exception as error:
        _create(choice, {**arguments, PRETRAINED: False})  # raises if the arguments are the problem
        advice = "check the network connection, or use --init-from FILE"
        raise choice.failed("its published weights cannot be downloaded or do not fit", error, advice) from None


def _load(choice: NetworkChoice, arguments: Mapping[str, object], weights: dict[str, Tensor]) -> nn.Module:
    num_classes = _num_classes(choice, weights)
    # With equal numbers of classes here and in the file, timm loads the weights strictly.
    overlay = {"state_dict": weights, "num_classes": num_classes, "custom_load": False, "label_offset": 0}
    try:
        return create_model(choice.architecture, pretrained_cfg_overlay=overlay, **arguments, num_classes=num_classes)
    except Exception as error:
        _create(choice, {**arguments, PRETRAINED: False})
        advice = "use weights of this network, trained with the same network_args"
        raise choice.failed("the weights belong to a different network", error, advice) from None


def _num_classes(choice: NetworkChoice, weights: Mapping[str, Tensor]) -> int:
    """Return the number of logits of the last layer in a file, or 0 if the file does not have this layer."""
    name = f"{_first(_config(choice).classifier)}.weight"
    return len(weights[name]) if name in weights else 0


def _first(names: str | Sequence[str] | None) -> str:
    """Return the first of one or several names; timm uses tuples for networks with two classifiers or inputs."""
    return names if isinstance(names, str) else next(iter(names or ()), "")


def check_input(network: nn.Module, choice: NetworkChoice, task: NetworkTask) -> None:
    """Raise UserError if the network cannot process images of this size, for example because it downsamples too far."""
    try:
        shape = run_copy(network, (1, task.in_channels, task.height, task.width), train=False)[0].shape
        if shape != (1, task.num_classes):
            raise ValueError(f"the output has shape {tuple(shape)}, not {(1, task.num_classes)}")
    except Exception as error:
        advice = "use --set size=PIXELS to scale the images, or choose a different network"
        raise choice.failed(f"cannot process images of {task.width}×{task.height} pixels", error, advice) from None
