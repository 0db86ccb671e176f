"""The settings that every run has, with their defaults, bounds and descriptions; batch sizes, lengths and intervals."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar, Literal, TypeAlias, cast

from paceline.contracts.data_spec import MAX_CHANNELS
from paceline.core.errors import UserError
from paceline.core.text import short_repr

Number = int | float
BOUNDS = {"at least": operator.ge, "above": operator.gt, "below": operator.lt, "at most": operator.le}


def setting(
    default: Any,
    meaning: str,
    *,
    mutable_on_resume: bool = False,
    at_least: Number | None = None,
    above: Number | None = None,
    below: Number | None = None,
    at_most: Number | None = None,
) -> Any:
    """Declare a setting as a field of a frozen dataclass.

    Args:
        default: The default value.
        meaning: A one-line description, shown by `paceline settings` and in the documentation.
        mutable_on_resume: Whether a run may resume with a different value.
        at_least: The smallest allowed value.
        above: The value must be greater than this.
        below: The value must be less than this.
        at_most: The largest allowed value.

    Returns:
        A dataclass field, typed as Any so that type checkers accept it as the default for any annotation.

    Examples:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Settings:
        ...     width: int = paceline.setting(32, "channels of the first layer", at_least=1)
        >>> Settings(width=64)
        Settings(width=64)
    """
    limits = zip(BOUNDS, (at_least, above, below, at_most), strict=True)
    bounds = {words: limit for words, limit in limits if limit is not None}
    metadata = {"meaning": meaning, "mutable_on_resume": mutable_on_resume, "bounds": bounds}
    return field(default=default, metadata=metadata)


mutable_setting = partial(setting, mutable_on_resume=True)


@dataclass(frozen=True)
class LearnerSettings:
    """The settings of optimizers, schedules and EMA. Each can be set for a single network: `--set NETWORK.lr=0.1`."""

    optimizer: Literal["sgd", "adam", "adamw"] = setting("adam", "optimizer")
    lr: float = setting(1e-3, "peak learning rate", at_least=0)
    momentum: float = setting(0.9, "momentum for sgd", at_least=0, below=1)
    nesterov: bool = setting(True, "use Nesterov momentum for sgd")
    beta1: float = setting(0.9, "decay rate of the first moment, for adam and adamw", at_least=0, below=1)
    beta2: float = setting(0.999, "decay rate of the second moment, for adam and adamw", at_least=0, below=1)
    burn_in_beta2: float = setting(
        0.0, "initial value of beta2, which rises to beta2 during the burn-in; 0: constant", at_least=0, below=1
    )
    burn_in_lr: float = setting(
        1.0, "learning rate at the start of the burn-in, as a multiple of the scheduled rate", above=0
    )
    weight_decay: float = setting(0.0, "weight decay", at_least=0)
    layer_decay: float = setting(
        1.0,
        "layer-wise decay: factor on the learning rate for each layer further from the output; 1 disables it",
        above=0,
        at_most=1,
    )
    decay_norms: bool = setting(True, "also apply weight decay to biases and normalisation layers")
    schedule: Literal["constant", "step", "cosine", "linear"] = setting("constant", "learning rate schedule")
    warmup: str = setting("0 images", "length of the warm-up, during which the learning rate rises linearly from zero")
    hold: str = setting("0%", "for the linear schedule: how long to keep the peak rate before it decays to zero")
    milestones: str = setting(
        "50%", "for the step schedule: comma-separated points at which the rate is multiplied by gamma"
    )
    gamma: float = setting(0.1, "for the step schedule: factor applied to the learning rate at each milestone", above=0)
    clip: float = setting(0.0, "clip gradients to this norm; 0 disables clipping", at_least=0)
    ema_half_life: str = setting(
        "0 images",
        "half-life of the exponential moving average (EMA) of the weights; 0 disables EMA; during a burn-in, the "
        "half-life rises from zero",
    )


SEEDS = 2**63  # seeds of random number generators must be below this


RETIRED = frozenset({"niqe"})  # settings of older versions, which run folders may contain; they are ignored


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run, apart from those of its recipe and learners.

    They are passed to sources, loaders, strategies and evaluators. A source can add settings in a subclass,
    `Source.Settings`. `paceline settings RECIPE` lists all settings.

    Examples:
        >>> settings = paceline.RunSettings(data="cifar10", devices=2)
        >>> settings
        RunSettings(data='cifar10', devices=2)
        >>> settings.epochs
        10.0
    """

    data: str = setting("digits", "data source: a name, or the path to your own .py file")
    data_root: str = mutable_setting(
        "data", "folder that contains the source's files, or that they are downloaded to; for --data shards also a URL"
    )
    preset: str = mutable_setting("", "named set of settings defined by the recipe")
    strategy: str = mutable_setting(
        "auto",
        "strategy: single, dp, ddp, fsdp, lightning or the path to your own .py file; "
        "auto: ddp on several devices, else single",
    )
    accelerator: Literal["auto", "cpu", "cuda"] = mutable_setting(
        "auto", "type of device to run on; auto: cuda if there is a GPU, else cpu"
    )
    devices: int = mutable_setting(1, "number of devices to train on", at_least=1)
    gpus: str = mutable_setting("", "comma-separated IDs of the GPUs to use, in local-rank order, e.g. 2,3")
    backend: Literal["auto", "nccl", "gloo"] = mutable_setting(
        "auto", "communication backend; auto: nccl on GPUs, gloo on CPUs"
    )
    nnodes: str = mutable_setting("1", "number of hosts, or MIN:MAX, e.g. 1:4; on several hosts, --devices is per host")
    rdzv: str = mutable_setting(
        "", "HOST:PORT at which the hosts find each other (rendezvous); HOST must be one of these hosts"
    )
    max_restarts: int = mutable_setting(
        0, "maximum number of restarts from the last checkpoint after a worker dies", at_least=0
    )
    timeout: float = mutable_setting(
        600.0, "seconds without progress after which a process is considered hung", above=0
    )
    join_timeout: float = mutable_setting(600.0, "seconds to wait for other hosts to join the run", above=0)
    start_timeout: float = mutable_setting(
        120.0, "seconds that ranks started by torchrun, srun or a script wait for each other", above=0
    )
    compress: Literal["none", "bf16"] = setting(
        "none", "gradient compression for ddp and fsdp; bf16 halves the traffic but rounds gradients"
    )
    sync_batchnorm: Literal["auto", "on", "off"] = setting(
        "auto", "synchronise BatchNorm across processes; auto: on for networks that have BatchNorm"
    )

    batch_size: str = setting("128", "images per step across all devices; 32/device means 32 per device")
    accumulate: int = setting(1, "number of micro-batches per step for gradient accumulation", at_least=1)
    epochs: float = mutable_setting(10.0, "length of training in epochs", above=0)
    images: int = mutable_setting(0, "length of training in images; overrides --epochs", at_least=0)
    burn_in: str = setting(
        "0 images",
        "length of the burn-in at the start of training, during which scheduled values reach their final value",
    )
    seed: int = setting(0, "seed for initial weights, sample order, augmentation and noise", at_least=0, below=SEEDS)
    init_from: str = setting(
        "", "run folder or file (.safetensors, .pth) with initial weights for some or all networks"
    )
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp64"] = setting(
        "auto", "numerical precision; auto: bf16 on GPUs that support it, else fp32"
    )
    graph: Literal["auto", "on", "off"] = mutable_setting(
        "auto", "run each training step as one CUDA graph; auto: only if this is known to work"
    )
    checkpoint_activations: Literal["auto", "on", "off"] = mutable_setting(
        "auto", "save memory by recomputing the networks' blocks in the backward pass; auto: on for fsdp, else off"
    )
    compile: Literal["auto", "on", "off"] = setting(
        "auto", "compile each network with torch.compile before training; auto: on GPUs, if the run is long"
    )
    deterministic: bool = mutable_setting(False, "make repeated runs on GPUs bit-identical, at the cost of some speed")
    profile: int = mutable_setting(
        0,
        "trace N training steps; write the trace and a summary of the time spent to profile/ in the run folder; 0: off",
        at_least=0,
    )
    scale_lr: Literal["none", "linear", "sqrt"] = setting(
        "none", "scale learning rates with the batch size, relative to reference_batch"
    )
    reference_batch: int = setting(128, "batch size that the recipe's learning rates were chosen for", at_least=1)

    loader: str = mutable_setting(
        "auto", "data loader: workers, resident or dali; auto: resident if the data fits in memory, else workers"
    )
    workers: int = mutable_setting(2, "worker processes per device, for --loader workers", at_least=0, below=513)
    bad_images: Literal["fail", "skip"] = setting("fail", "what to do with unreadable images: fail or skip them")
    size: int = setting(
        0, "height and width of the images in pixels; 0 keeps the source's size", at_least=0, at_most=65_536
    )
    channels: int = setting(
        0,
        "number of channels; 1 converts to greyscale, 3 to RGB; 0: the source's channels (for most sources: RGB)",
        at_least=0,
        at_most=MAX_CHANNELS,
    )
    preview_channels: str = mutable_setting(
        "",
        "channels to show in sample images, counted from 0: one, or three as red, green and blue, e.g. 4,2,0; "
        "default: the first three, or the first if there are two",
    )
    validation: float = setting(
        0.1, "fraction of the training samples held out to select the best checkpoint", at_least=0, below=1
    )
    split_seed: int = setting(0, "seed for the validation split", at_least=0, below=SEEDS)
    crop: int = setting(0, "size in pixels of the random crops to train on; 0 trains on whole images", at_least=0)
    pad_crop: int = setting(
        0, "pad by this many pixels, then crop to the original size at a random position", at_least=0, at_most=65_536
    )
    flip: Literal["auto", "on", "off"] = setting(
        "auto", "flip half of the samples horizontally; auto: only if the source allows it"
    )
    rot90: Literal["off", "on"] = setting("off", "rotate samples by a random multiple of 90°; needs square images")
    swap_colours: Literal["off", "on"] = setting(
        "off", "put the red, green and blue channels of samples in random order"
    )
    cutout: int = setting(0, "size in pixels of a random square to blank out in each image; 0 disables it", at_least=0)

    inception: str = mutable_setting(
        "", "file with the 2015 Inception network for FID, or torch-fidelity to use that package's network"
    )
    inception_sha256: str = mutable_setting(
        "", "SHA-256 of an --inception file that you trust; TorchScript files can run code"
    )
    features: str = mutable_setting(
        "",
        "finished classification run whose network computes the features for evaluation or, with --inception, the "
        "Inception Score",
    )
    generated_images: int = mutable_setting(
        0, "number of images to generate per evaluation; 0: as many as the evaluated split contains", at_least=0
    )
    per_class: bool = mutable_setting(False, "also measure the FID of each class, for class-conditional generators")
    feature_precision: Literal["fp32", "tf32", "fp16"] = mutable_setting(
        "fp32", "precision of the feature network on GPUs; fp16 needs --inception FILE"
    )
    protocol: Literal["y", "rgb"] = mutable_setting(
        "y", "channels used to compare restored images: y (luma only, as in MATLAB) or rgb (all)"
    )
    few_images: Literal["fail", "allow"] = mutable_setting(
        "fail",
        "what to do if there are too few images for reliable metrics (fewer images than features): fail or allow",
    )

    out: str = mutable_setting("", "run folder (default: runs/RECIPE-DATA-SEED)")
    mirror: str = mutable_setting("", "URL to mirror the run to while it trains, e.g. s3://bucket/name")
    resume_from: str = mutable_setting(
        "", "URL of a mirror to resume from if its last checkpoint is newer than the one in --out"
    )
    mirror_every: float = mutable_setting(10.0, "seconds between mirror updates", above=0)
    mirror_wait: float = mutable_setting(
        120.0, "maximum number of seconds to wait for the mirror at the end of a run", at_least=0
    )
    loggers: str = mutable_setting(
        "tensorboard", "comma-separated loggers (names or .py files) that also receive metrics and samples"
    )
    logger_wait: float = mutable_setting(
        30.0, "maximum number of seconds to wait for loggers at the end of a run", at_least=0
    )
    log_every: str = mutable_setting("50 steps", "interval between log lines")
    evaluate_every: str = mutable_setting(
        "auto",
        "interval between evaluations, or never; auto: at least 1 epoch, and longer if evaluation would take too long",
    )
    sample_every: str = mutable_setting("auto", "interval between sample images, or never; auto: at least 1 epoch")
    save_every: str = mutable_setting("auto", "interval between checkpoints; auto: at least 1 epoch")
    keep: int = mutable_setting(2, "number of recent checkpoints to keep in addition to the best one", at_least=1)
    check_replicas: int = mutable_setting(
        0, "check every N steps that all replicas have the same weights; 0 disables the check", at_least=0
    )

    def __repr__(self) -> str:
        return short_repr(self)


class HasSettings:
    """Base class for classes that receive the settings of a run and can add more settings."""

    # To add settings, a subclass replaces this with a frozen dataclass that extends RunSettings.
    Settings: ClassVar[type[RunSettings]] = RunSettings


SHARED_SETTINGS = frozenset(field.name for group in (RunSettings, LearnerSettings) for field in fields(group))


Unit: TypeAlias = Literal["images", "epochs", "steps", "%"]
NEVER = "never"
INTERVALS = ("log_every", "evaluate_every", "sample_every", "save_every")
CAN_BE_NEVER = ("evaluate_every", "sample_every")
AUTO = "auto"
CAN_BE_AUTO = ("evaluate_every", "sample_every", "save_every")
MAX_BATCH = 10_000_000  # a larger batch is a mistake, which would fill the memory
MAX_AMOUNT = 1e18  # far longer than any run; the number of images in such a span is still finite


@dataclass(frozen=True)
class Span:
    """A length of training: `5 epochs`, `200k images`, `50 steps`, `50%` of the run, or `0`."""

    amount: float
    unit: Unit

    @classmethod
    def parse(cls, text: str, name: str, *, or_words: Sequence[str] = ()) -> Span:
        """Parse a span; the error message refers to the setting `name`, and lists the words that it can be instead."""
        if re.fullmatch(r"\s*0+\s*", str(text)):
            return cls(0.0, "images")  # zero is the same in every unit
        match = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*(k|m)?\s*(images?|epochs?|steps?|%)\s*", str(text).lower())
        try:
            if not match:
                raise ValueError
            amount = float(match[1]) * {"k": 1e3, "m": 1e6}.get(match[2] or "", 1)
        except ValueError:
            expected = ["a span like '5 epochs', '200k images', '50 steps' or '50%'", *map(repr, or_words)]
            raise UserError(f"{name}={text!r}: expected {', or '.join(expected)}") from None
        if amount > MAX_AMOUNT:
            raise UserError(f"{name}={text!r}: must be at most {MAX_AMOUNT:g} {match[3]}")
        unit = match[3] if match[3] == "%" else match[3].rstrip("s") + "s"
        return cls(amount, cast(Unit, unit))

    def to_images(self, *, epoch: int, step: int, total: int) -> int:
        """Return the span in images, given the number of images per epoch, per step and in the entire run."""
        return round(self.amount * {"images": 1, "epochs": epoch, "steps": step, "%": total / 100}[self.unit])


def parse_interval(text: str, name: str) -> Span | None:
    """Parse the interval in the setting `name`, one of `INTERVALS`; return None for `never`, length 0 for `auto`."""
    can_be_never, can_be_auto = name in CAN_BE_NEVER, name in CAN_BE_AUTO
    if can_be_auto and text.strip().lower() == AUTO:
        return Span(0.0, "images")
    if is_never(text):
        if can_be_never:
            return None
        raise UserError(f"{name}={text!r}: not supported; use '100%' for an interval as long as the run")
    span = Span.parse(text, name, or_words=[NEVER] * can_be_never + [AUTO] * can_be_auto)
    if not span.amount:
        alternative = "'never' to switch it off" if can_be_never else "'100%' for an interval as long as the run"
        raise UserError(f"{name}={text!r}: must be greater than 0; use {alternative}")
    return span


def is_never(interval: str) -> bool:
    """Return whether an interval setting has the value `never`."""
    return interval.strip().lower() == NEVER


def split_batch(text: str, devices: int, accumulate: int) -> int:
    """Return the global batch size from `128` or `32/device`; raise UserError if a micro-batch would be empty."""
    match = re.fullmatch(r"\s*(\d+)\s*(/\s*device)?\s*", str(text))
    if not match or int(match[1]) == 0:
        raise UserError(f"--batch-size {text!r}: expected a number like 128, or a number per device like 32/device")
    batch = int(match[1]) * (devices if match[2] else 1)
    if batch > MAX_BATCH:
        raise UserError(f"--batch-size {text}: must be at most {MAX_BATCH:,} images; use a smaller batch")
    if batch < devices * accumulate:
        raise UserError(
            f"--batch-size {batch}: needs at least {devices * accumulate} images "
            f"({devices} devices × {accumulate} micro-batches); use a larger batch"
        )
    return batch
