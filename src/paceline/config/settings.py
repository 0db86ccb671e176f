"""The settings of every run: typed, each with a one-line meaning, which is its help text.

Recipes and sources declare theirs in the same way.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

Number = int | float
SEEDS = 2**63  # random number generators accept seeds below this
BOUNDS = {"at least": operator.ge, "above": operator.gt, "below": operator.lt, "at most": operator.le}


def setting(
    default: Any,
    meaning: str,
    *,
    flag: bool = False,
    mutable_on_resume: bool = False,
    at_least: Number | None = None,
    above: Number | None = None,
    below: Number | None = None,
    at_most: Number | None = None,
) -> Any:
    """Declare a setting: `meaning` is its help text, `flag` adds `--name`.

    `mutable_on_resume` lets a resumed run change it. The last four are bounds on its value.
    """
    limits = zip(BOUNDS, (at_least, above, below, at_most), strict=True)
    bounds = {words: limit for words, limit in limits if limit is not None}
    metadata = {"meaning": meaning, "flag": flag, "mutable_on_resume": mutable_on_resume, "bounds": bounds}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run besides those of its recipe and its learners."""

    data: str = setting("digits", "the source of the data: a name, or the path of your own .py file", flag=True)
    data_root: str = setting(
        "data",
        "folder that holds the source's files, or that a download is saved to",
        flag=True,
        mutable_on_resume=True,
    )
    preset: str = setting("", "a named set of the recipe's settings", flag=True, mutable_on_resume=True)
    strategy: str = setting(
        "auto",
        "single, dp, ddp, lightning or the path of your own .py file; auto is ddp on several devices, else single",
        flag=True,
        mutable_on_resume=True,
    )
    accelerator: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "the kind of device to run on; auto is cuda where there is a GPU", flag=True, mutable_on_resume=True
    )
    devices: int = setting(1, "number of devices that share the run", flag=True, mutable_on_resume=True, at_least=1)
    gpus: str = setting(
        "",
        "ids of the GPUs to use, e.g. 2,3; each process uses the one at its local rank",
        flag=True,
        mutable_on_resume=True,
    )
    backend: Literal["auto", "nccl", "gloo"] = setting(
        "auto", "communication backend; auto is nccl on GPUs and gloo on CPUs", flag=True, mutable_on_resume=True
    )
    nnodes: str = setting(
        "1",
        "number of hosts, or MIN:MAX, e.g. 1:4; --devices is then the number on each host",
        flag=True,
        mutable_on_resume=True,
    )
    rdzv: str = setting("", "HOST:PORT of the rendezvous; HOST is one of the hosts", flag=True, mutable_on_resume=True)
    max_restarts: int = setting(
        0,
        "how often to restart from the last checkpoint after a worker dies",
        flag=True,
        mutable_on_resume=True,
        at_least=0,
    )
    timeout: float = setting(
        600.0,
        "seconds without progress after which a process counts as hung",
        flag=True,
        mutable_on_resume=True,
        above=0,
    )
    join_timeout: float = setting(
        600.0, "seconds that a host waits for the other hosts", mutable_on_resume=True, above=0
    )
    compress: Literal["none", "bf16"] = setting(
        "none", "ddp: send gradients in bf16; halves the traffic and rounds them", flag=True
    )
    sync_batchnorm: Literal["auto", "on", "off"] = setting(
        "auto", "synchronize BatchNorm over all processes; auto is on for networks that have BatchNorm", flag=True
    )

    batch_size: str = setting("128", "images per step over all devices, or per device, e.g. 32/device", flag=True)
    accumulate: int = setting(1, "micro-batches per step, whose gradients are accumulated", flag=True, at_least=1)
    epochs: float = setting(10.0, "length of training in epochs", flag=True, mutable_on_resume=True, above=0)
    images: int = setting(
        0, "length of training in images; overrides --epochs", flag=True, mutable_on_resume=True, at_least=0
    )
    seed: int = setting(
        0, "seed of initial weights, sample order, augmentation and noise", flag=True, at_least=0, below=SEEDS
    )
    init_from: str = setting(
        "", "a run's folder or a .safetensors file with initial weights for some or all networks", flag=True
    )
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp64"] = setting(
        "auto", "precision of the computation; auto is bf16 on GPUs that support it, else fp32", flag=True
    )
    graph: Literal["auto", "on", "off"] = setting(
        "auto",
        "replay the whole step as one CUDA graph; auto is on where it is known to work",
        flag=True,
        mutable_on_resume=True,
    )
    compile: bool = setting(False, "compile each network with torch.compile before training", flag=True)
    deterministic: bool = setting(
        False, "make repeated runs on GPUs bit-identical, at some cost in speed", flag=True, mutable_on_resume=True
    )
    scale_lr: Literal["none", "linear", "sqrt"] = setting(
        "none", "scale learning rates with the batch size, relative to reference_batch", flag=True
    )
    reference_batch: int = setting(128, "the batch size that the recipe's learning rates were chosen for", at_least=1)

    loader: str = setting(
        "auto",
        "workers, resident or dali; auto is resident if the data fits in the device's memory",
        flag=True,
        mutable_on_resume=True,
    )
    workers: int = setting(
        2, "worker processes per device, for --loader workers", flag=True, mutable_on_resume=True, at_least=0
    )
    bad_images: Literal["fail", "skip"] = setting(
        "fail", "whether unreadable images raise an error or are skipped", flag=True
    )
    size: int = setting(0, "side of the images in pixels; 0 keeps the source's size")
    channels: int = setting(0, "1 converts images to grayscale, 3 to RGB; 0 keeps the source's channels")
    validation: float = setting(
        0.1, "fraction of the training samples held out to select the best checkpoint", at_least=0, below=1
    )
    split_seed: int = setting(0, "seed of the validation split", at_least=0, below=SEEDS)
    crop: int = setting(
        0, "side in pixels of the random crop to train on; 0 trains on whole images", flag=True, at_least=0
    )
    pad_crop: int = setting(
        0, "pad images by this many pixels, then crop to the original size at a random position", at_least=0
    )
    flip: Literal["auto", "on", "off"] = setting(
        "auto", "flip half of the samples horizontally; auto does where the source allows it"
    )
    rot90: Literal["off", "on"] = setting("off", "rotate samples by a random multiple of 90°; needs square images")
    cutout: int = setting(0, "side in pixels of a random square that is blanked; 0 blanks none", at_least=0)

    inception: str = setting(
        "",
        "FID: file of the 2015 Inception network, or torch-fidelity",
        flag=True,
        mutable_on_resume=True,
    )
    inception_sha256: str = setting(
        "",
        "SHA-256 of an --inception file that you trust: a TorchScript file can run code",
        flag=True,
        mutable_on_resume=True,
    )
    features: str = setting(
        "",
        "without --inception: a finished classification run whose features evaluate generated images",
        mutable_on_resume=True,
    )
    generated_images: int = setting(
        0, "images to generate per evaluation; 0 generates as many as the split has", mutable_on_resume=True, at_least=0
    )
    feature_precision: Literal["fp32", "tf32", "fp16"] = setting(
        "fp32",
        "precision of the feature network on GPUs; fp16 needs --inception",
        mutable_on_resume=True,
    )
    protocol: Literal["y", "rgb"] = setting(
        "y",
        "how restored images are compared: y on the luma channel as in MATLAB, rgb on all channels",
        mutable_on_resume=True,
    )
    few_images: Literal["fail", "allow"] = setting(
        "fail", "what to do with fewer images than the feature network has features", mutable_on_resume=True
    )

    out: str = setting("", "the run's folder; default runs/RECIPE-DATA-SEED", flag=True, mutable_on_resume=True)
    mirror: str = setting(
        "", "URL to mirror the run to while it trains, e.g. s3://bucket/name", flag=True, mutable_on_resume=True
    )
    resume_from: str = setting(
        "", "URL of a mirror to resume from if it is ahead of --out", flag=True, mutable_on_resume=True
    )
    mirror_every: float = setting(10.0, "seconds between two updates of the mirror", mutable_on_resume=True, above=0)
    mirror_wait: float = setting(
        120.0, "seconds that a run waits for its mirror at the end", mutable_on_resume=True, at_least=0
    )
    loggers: str = setting(
        "tensorboard",
        "loggers that get metrics and samples besides the run's own files: names or .py files, with commas",
        flag=True,
        mutable_on_resume=True,
    )
    log_every: str = setting("50 steps", "interval between two log lines", mutable_on_resume=True)
    evaluate_every: str = setting("1 epochs", "interval between two evaluations", mutable_on_resume=True)
    sample_every: str = setting("1 epochs", "interval between two grids of sample images", mutable_on_resume=True)
    save_every: str = setting("1 epochs", "interval between two checkpoints", mutable_on_resume=True)
    keep: int = setting(2, "number of recent checkpoints to keep besides the best", mutable_on_resume=True, at_least=1)
    check_replicas: int = setting(
        0,
        "compare the weights of all replicas every N steps; 0 never does",
        flag=True,
        mutable_on_resume=True,
        at_least=0,
    )


class HasSettings:
    """A class that is constructed with a run's settings and may add settings of its own."""

    Settings: ClassVar[type[RunSettings]] = RunSettings  # a frozen dataclass that extends it; each field is a setting


@dataclass(frozen=True)
class LearnerSettings:
    """The settings of learners. Each can be given for one network: `--set NETWORK.lr=0.1`."""

    optimizer: Literal["sgd", "adam", "adamw"] = setting("adam", "the optimizer")
    lr: float = setting(1e-3, "peak learning rate", flag=True, at_least=0)
    momentum: float = setting(0.9, "sgd: momentum", at_least=0, below=1)
    nesterov: bool = setting(True, "sgd: use Nesterov momentum")
    beta1: float = setting(0.9, "adam and adamw: decay of the first moment", at_least=0, below=1)
    beta2: float = setting(0.999, "adam and adamw: decay of the second moment", at_least=0, below=1)
    weight_decay: float = setting(0.0, "weight decay", at_least=0)
    decay_norms: bool = setting(True, "apply weight decay to biases and normalization layers too")
    schedule: Literal["constant", "step", "cosine", "linear"] = setting("constant", "learning rate schedule")
    warmup: str = setting("0 images", "span over which the learning rate rises linearly from zero")
    hold: str = setting("0%", "linear: span at the peak rate, after which the rate falls to zero at the end")
    milestones: str = setting("50%", "step: when the rate is multiplied by gamma; separate several with commas")
    gamma: float = setting(0.1, "step: factor of the learning rate at each milestone", above=0)
    clip: float = setting(0.0, "clip gradients to this norm; 0 does not clip", at_least=0)
    ema_half_life: str = setting("0 images", "half-life of the weights' EMA; 0 keeps no EMA")


# Commands that only try some steps have no flags for settings of a whole run.
_WHOLE_RUN_SETTINGS = (
    *("strategy", "nnodes", "rdzv", "max_restarts", "epochs", "images", "inception", "inception_sha256"),
    *("out", "mirror", "resume_from", "check_replicas", "loggers"),
)
SETTINGS_NOT_IN_VERIFY = (*_WHOLE_RUN_SETTINGS, "precision", "graph")  # it trains step by step in float64
SETTINGS_NOT_IN_PLAN = (*_WHOLE_RUN_SETTINGS, "init_from", "scale_lr")  # it shows both ways to scale

# Other programs' names for settings, where a close match would not find them.
COMMON_ALIASES = {"learning_rate": "lr", "num_workers": "workers", "bs": "batch_size", "wd": "weight_decay"}
