"""The settings that every run has: typed, each with one line of meaning. Recipes and sources add theirs likewise."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

Number = int | float
SEEDS = 2**63  # random number generators take as many
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
    """A settings field: its meaning is the help text; `flag` gives it a flag; `free` lets a resumed run change it."""
    limits = zip(BOUNDS, (at_least, above, below, at_most), strict=True)
    bounds = {words: limit for words, limit in limits if limit is not None}
    return field(
        default=default, metadata={"meaning": meaning, "flag": flag, "free": mutable_on_resume, "bounds": bounds}
    )


@dataclass(frozen=True)
class RunSettings:
    """What a run needs to know besides its recipe and its learners."""

    data: str = setting("digits", "the source: a name, or the path of your own .py file", flag=True)
    data_root: str = setting(
        "data", "folder with the source's files, or where a download goes", flag=True, mutable_on_resume=True
    )
    preset: str = setting("", "a named set of the recipe's settings", flag=True, mutable_on_resume=True)
    strategy: str = setting(
        "auto", "single, dp, ddp or lightning; auto is ddp when devices > 1", flag=True, mutable_on_resume=True
    )
    accelerator: Literal["auto", "cpu", "cuda"] = setting("auto", "where to compute", flag=True, mutable_on_resume=True)
    devices: int = setting(1, "how many devices share the run", flag=True, mutable_on_resume=True, at_least=1)
    gpus: str = setting(
        "",
        "ids of the GPUs to use, e.g. 2,3; a process takes the one at its local rank",
        flag=True,
        mutable_on_resume=True,
    )
    backend: Literal["auto", "nccl", "gloo"] = setting(
        "auto", "how processes talk; auto is nccl on GPUs, gloo on CPUs", flag=True, mutable_on_resume=True
    )
    nnodes: str = setting(
        "1",
        "hosts that share the run, or fewest:most, e.g. 1:4; --devices are then each host's",
        flag=True,
        mutable_on_resume=True,
    )
    rdzv: str = setting("", "HOST:PORT where the hosts meet; HOST is one of them", flag=True, mutable_on_resume=True)
    max_restarts: int = setting(
        0,
        "how often the command begins again from the last checkpoint after a loss",
        flag=True,
        mutable_on_resume=True,
        at_least=0,
    )
    timeout: float = setting(
        600.0,
        "seconds without a sign of life after which a process counts as hung",
        flag=True,
        mutable_on_resume=True,
        above=0,
    )
    join_timeout: float = setting(600.0, "seconds that a host waits for the others", mutable_on_resume=True, above=0)
    compress: Literal["none", "bf16"] = setting(
        "none", "ddp: send gradients in bf16, which halves their bytes and rounds them", flag=True
    )
    sync_batchnorm: Literal["auto", "on", "off"] = setting(
        "auto", "one BatchNorm over all processes; auto is on when a network has BatchNorm", flag=True
    )

    batch_size: str = setting("128", "images per step over all devices, or per device as 32/device", flag=True)
    accumulate: int = setting(1, "micro-batches per step", flag=True, at_least=1)
    epochs: float = setting(
        10.0, "length of training in passes over the data", flag=True, mutable_on_resume=True, above=0
    )
    images: int = setting(
        0, "length of training in images; overrides --epochs", flag=True, mutable_on_resume=True, at_least=0
    )
    seed: int = setting(0, "of weights, order, augmentation and noise", flag=True, at_least=0, below=SEEDS)
    init_from: str = setting(
        "", "a run's folder or a .safetensors file: the recipe's networks that are in it start from it", flag=True
    )
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp64"] = setting(
        "auto", "of the arithmetic; auto is bf16 on GPUs that have it, else fp32", flag=True
    )
    graph: Literal["auto", "on", "off"] = setting(
        "auto",
        "replay the whole step as one CUDA graph; auto is on where it is known to work",
        flag=True,
        mutable_on_resume=True,
    )
    compile: bool = setting(False, "compile each network with torch.compile before training", flag=True)
    deterministic: bool = setting(
        False, "bit-identical repeats on GPUs, at some cost in speed", flag=True, mutable_on_resume=True
    )
    scale_lr: Literal["none", "linear", "sqrt"] = setting(
        "none", "scale learning rates with the batch, relative to reference_batch", flag=True
    )
    reference_batch: int = setting(128, "the batch for which the recipe's learning rates were chosen", at_least=1)

    loader: str = setting(
        "auto",
        "workers, resident or dali; auto is resident when the data fits the device",
        flag=True,
        mutable_on_resume=True,
    )
    workers: int = setting(
        2, "loading processes per device, for loader workers", flag=True, mutable_on_resume=True, at_least=0
    )
    bad_images: Literal["fail", "skip"] = setting("fail", "what to do about unreadable images", flag=True)
    size: int = setting(0, "side of the pictures in pixels; 0 keeps the source's own")
    channels: int = setting(0, "1 makes pictures grey, 3 makes them colour; 0 keeps the source's own")
    validation: float = setting(
        0.1, "share of the training samples that is held out to choose the best model", at_least=0, below=1
    )
    split_seed: int = setting(0, "of the validation split", at_least=0, below=SEEDS)
    crop: int = setting(
        0, "side in pixels of the window of a picture that training sees; 0 is all of it", flag=True, at_least=0
    )
    pad_crop: int = setting(0, "pad by so many pixels, then crop back at a random place", at_least=0)
    flip: Literal["auto", "on", "off"] = setting(
        "auto", "mirror half of the samples; auto asks the source whether that is allowed"
    )
    rot90: Literal["off", "on"] = setting("off", "turn samples by 0 to 3 quarters; for square pictures")
    cutout: int = setting(0, "side of a random square that is blanked", at_least=0)

    inception: str = setting(
        "",
        "file of the Inception network of 2015 that FID is defined by, or torch-fidelity",
        flag=True,
        mutable_on_resume=True,
    )
    inception_sha256: str = setting(
        "",
        "SHA-256 of an --inception file that you trust; a TorchScript file is a program",
        flag=True,
        mutable_on_resume=True,
    )
    features: str = setting(
        "",
        "without --inception: a finished classification run whose features judge generated pictures",
        mutable_on_resume=True,
    )
    generated_images: int = setting(
        0, "generated pictures per evaluation; 0 makes as many as the split has", mutable_on_resume=True, at_least=0
    )
    feature_precision: Literal["fp32", "tf32", "fp16"] = setting(
        "fp32",
        "of the network that judges generated pictures, on GPUs; fp16 with --inception alone",
        mutable_on_resume=True,
    )
    protocol: Literal["y", "rgb"] = setting(
        "y",
        "how restored pictures are compared: y by luma as MATLAB computes it, rgb by all colours",
        mutable_on_resume=True,
    )
    few_images: Literal["refuse", "allow"] = setting(
        "refuse", "what to do about fewer pictures than the judging network has features", mutable_on_resume=True
    )

    out: str = setting("", "the run's folder; default runs/RECIPE-DATA-SEED", flag=True, mutable_on_resume=True)
    mirror: str = setting(
        "", "URL that the run is copied to as it trains, e.g. s3://bucket/name", flag=True, mutable_on_resume=True
    )
    resume_from: str = setting(
        "", "URL of a mirror to go on from where it is ahead of --out", flag=True, mutable_on_resume=True
    )
    mirror_every: float = setting(
        10.0, "seconds between two looks at what is new for the mirror", mutable_on_resume=True, above=0
    )
    mirror_wait: float = setting(
        120.0, "seconds that the end of a run waits for its mirror", mutable_on_resume=True, at_least=0
    )
    log_every: str = setting("50 steps", "between two lines of metrics", mutable_on_resume=True)
    evaluate_every: str = setting("1 epochs", "between two evaluations", mutable_on_resume=True)
    sample_every: str = setting("1 epochs", "between two grids of generated pictures", mutable_on_resume=True)
    save_every: str = setting("1 epochs", "between two checkpoints", mutable_on_resume=True)
    keep: int = setting(
        2, "how many of the last checkpoints stay, besides the best", mutable_on_resume=True, at_least=1
    )
    check_replicas: int = setting(
        0, "compare the replicas' weights every so many steps; 0 never", flag=True, mutable_on_resume=True, at_least=0
    )


class HasSettings:
    """What is made with a run's settings, and may have some of its own among them."""

    Settings: ClassVar[type[RunSettings]] = RunSettings  # a frozen dataclass that extends it; each field is a setting


@dataclass(frozen=True)
class LearnerSettings:
    """How one network learns; each can be set for one network: `--set NETWORK.lr=0.1`."""

    optimizer: Literal["sgd", "adam", "adamw"] = setting("adam", "the optimizer")
    lr: float = setting(1e-3, "learning rate at its highest", flag=True, at_least=0)
    momentum: float = setting(0.9, "of sgd", at_least=0, below=1)
    nesterov: bool = setting(True, "Nesterov's momentum, for sgd")
    beta1: float = setting(0.9, "of adam and adamw", at_least=0, below=1)
    beta2: float = setting(0.999, "of adam and adamw", at_least=0, below=1)
    weight_decay: float = setting(0.0, "on weights", at_least=0)
    decay_norms: bool = setting(True, "weight decay on biases and normalisation layers too")
    schedule: Literal["constant", "step", "cosine", "linear"] = setting(
        "constant", "of the learning rate over training"
    )
    warmup: str = setting("0 images", "the learning rate rises from zero over this span")
    hold: str = setting("0%", "linear: the rate stays at its highest until here, then falls to zero at the end")
    milestones: str = setting("50%", "step: where the rate is multiplied by drop; several with commas")
    gamma: float = setting(0.1, "step: the factor", above=0)
    clip: float = setting(0.0, "largest norm of the gradient; 0 does not clip", at_least=0)
    ema_half_life: str = setting("0 images", "half-life of the moving average of the weights; 0 keeps none")


# Settings whose flags a command does not have that only tries some steps: it would pass over them.
_OF_WHOLE_RUNS = (
    *("strategy", "nnodes", "rdzv", "max_restarts", "epochs", "images", "inception", "inception_sha256"),
    *("out", "mirror", "resume_from", "check_replicas"),
)
NOT_OF_VERIFY = (*_OF_WHOLE_RUNS, "precision", "graph")  # it trains step by step in float64
NOT_OF_PLAN = (*_OF_WHOLE_RUNS, "init_from", "scale_lr")  # it shows both ways to scale

# What others call a setting, where its name here is too unlike for a guess.
ALSO_CALLED = {"learning_rate": "lr", "num_workers": "workers", "bs": "batch_size", "wd": "weight_decay"}
