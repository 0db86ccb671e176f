"""Settings as flags of commands, and settings from other programs with what to use instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.config.settings import RunSettings, mutable_setting, setting
from paceline.core.types import SettingValue


@dataclass(frozen=True)
class PixelSettings(RunSettings):
    """Settings for sources whose images may have more than 8 bits per channel."""

    pixels: Literal["auto", "uint8", "uint16", "float32"] = setting(
        "auto", "data type of the pixels; auto: that of the first file, but uint8 for 16-bit grey and colour images"
    )
    value_range: str = setting(
        "",
        "pixel values LOW,HIGH that are scaled to -1 and 1; required for floating-point images; "
        "default for integers: the full range, such as 0,65535",
    )


@dataclass(frozen=True)
class SeparateTestFolder(PixelSettings):
    """Settings for sources whose test split may be in a separate folder."""

    test_root: str = mutable_setting(
        "",
        "folder with test images (for --data photos, pairs, panels, folder or shards); "
        "--data-root is then used only for training",
    )
    group_by: str = setting(
        "",
        "regular expression for file paths; files with the same first group "
        "(or the same match, if there is no group) go into the same split",
    )


@dataclass(frozen=True)
class PhotoSettings(SeparateTestFolder):
    """Settings for sources that may have a second, low-resolution file for every image."""

    low_root: str = mutable_setting(
        "", "comma-separated folders with low-resolution versions of the images, for --data photos"
    )
    low_suffix: str = setting(
        "", "suffix of low-resolution file names, such as _LR, if the images are in the same folder"
    )
    high_suffix: str = setting("", "suffix of high-resolution file names, such as _HR; requires low_suffix")
    test_low_root: str = mutable_setting(
        "", "comma-separated folders with low-resolution versions of the images in --test-root, for --data photos"
    )


SourceFlags = PhotoSettings  # this class has every source setting that is also a flag
# The settings that have a flag, by their group in `--help`. All others are set with `--set NAME=VALUE`.
GROUPS = {
    "Common": ("data", "preset", "epochs", "images", "batch_size", "lr", "seed", "out", "init_from"),
    "Data": ("data_root", "test_root", "low_root", "test_low_root", "crop", "bad_images", "loader", "workers"),
    "Devices": ("devices", "gpus", "accelerator", "strategy", "backend", "sync_batchnorm", "compress"),
    "Speed": ("precision", "compile", "graph", "deterministic", "accumulate", "scale_lr", "profile"),
    "Cluster": ("nnodes", "rdzv", "max_restarts", "timeout", "mirror", "resume_from", "check_replicas"),
    "Evaluation and logging": ("loggers", "inception", "inception_sha256"),
}
FLAGS = {name: group for group, names in GROUPS.items() for name in names}  # in the order of `--help`
FOLDERS = ("low_root", "test_root", "test_low_root")  # settings that belong to a particular --data-root


# Commands that run only a few steps do not have flags for these settings, which affect complete runs.
_WHOLE_RUN_SETTINGS = (
    *("strategy", "nnodes", "rdzv", "max_restarts", "epochs", "images", "inception", "inception_sha256"),
    *("out", "mirror", "resume_from", "check_replicas", "loggers", "profile"),
)
# `verify` always uses float64 without CUDA graphs.
SETTINGS_NOT_IN_VERIFY = (*_WHOLE_RUN_SETTINGS, "precision", "graph")
# `plan` predicts speed and memory, which neither of these changes.
SETTINGS_NOT_IN_PLAN = (*_WHOLE_RUN_SETTINGS, "init_from", "scale_lr")

SETTINGS_OF_EVALUATE = (
    *("data", "data_root", "low_root", "test_root", "test_low_root", "bad_images"),
    *("accelerator", "inception", "inception_sha256"),
)
DEFAULTS_OF_EVALUATE: dict[str, SettingValue] = dict.fromkeys(SETTINGS_OF_EVALUATE, "that of the run")
SETTINGS_OF_DOCTOR = ("data", "data_root", "crop", "batch_size", "workers", "accelerator")
SETTINGS_OF_PACK = ("data", "data_root", "bad_images", "workers")

STRATEGIES = "single,ddp"  # for `compare` and `verify`
# The default of `--devices` for commands that use several devices.
VERIFY_DEVICES = 2
COMPARE_DEVICES = 2
PLAN_DEVICES = 8


_GROUPS = {
    "use --set size=PIXELS": ("image_size", "img_size", "imageSize", "input_size", "resize"),
    "use --crop PIXELS": ("crop_size", "patch_size", "fineSize", "random_crop"),
    "use --set channels=N": ("nc", "in_channels", "num_channels", "n_channels"),
    "use --data NAME": ("dataset", "dataset_name"),
    "use --data-root DIR": ("dataroot", "data_dir", "data_path", "data_source", "train_dir", "train_source"),
    "leave it out: the data determines the number of classes": ("num_classes", "n_classes"),
    "use --epochs N": ("n_epochs", "num_epochs", "max_epochs", "epoch"),
    "use --epochs N, or --images N": ("niter", "n_iters", "num_iters", "total_iter", "max_steps", "total_steps"),
    "use --batch-size N": ("batchSize", "train_batch_size"),
    "use --workers N": ("threads", "num_threads", "nThreads", "n_cpu", "n_threads"),
    "use --gpus 0,1, or --devices N": ("gpu", "gpu_id", "gpu_ids"),
    "use --devices N": ("ngpu", "n_gpu", "nGPU", "num_gpu", "num_gpus", "n_GPUs", "world_size", "nproc_per_node"),
    "use --nnodes N": ("nodes", "num_nodes"),
    "use --backend nccl or gloo": ("dist_backend",),
    "leave it out: use --devices N, or start the command with torchrun": (
        *("local_rank", "rank", "node_rank", "distributed", "dist_url", "multiprocessing_distributed"),
    ),
    "use --accelerator cuda or cpu": ("cuda", "no_cuda", "use_gpu", "device"),
    "use --precision bf16 or fp16": ("amp", "use_amp", "fp16", "mixed_precision"),
    "use --seed N": ("manualSeed", "manual_seed", "random_seed"),
    "use --out DIR": (
        *("name", "exp_name", "outf", "out_dir", "output_dir", "save_dir", "save_path", "savetag", "log_dir"),
        *("checkpoints_dir", "checkpoint_dir", "results_dir"),
    ),
    "leave it out: the same command resumes the run": ("resume", "continue_train", "auto_resume", "start_epoch"),
    "use --init-from FILE; convert files from other projects with `paceline import`": (
        *("pretrain", "pretrained", "pretrain_path", "ckpt", "ckpt_path", "load_path", "weight"),
    ),
    "use --set 'log_every=50 steps'": ("print_freq", "log_freq", "log_interval", "log_step"),
    "use --set 'save_every=1 epoch'": ("save_freq", "save_interval", "save_epoch_freq", "save_latest_freq"),
    "use --set 'evaluate_every=1 epoch'": ("eval_freq", "eval_interval", "eval_step", "val_freq", "val_interval"),
    "use --set 'sample_every=1 epoch'": ("sample_interval", "sample_freq", "display_freq"),
    "use --set beta1=0.5": ("b1", "beta_1"),
    "use --set beta2=0.999": ("b2", "beta_2"),
    "use --set schedule=step, cosine or linear": ("lr_policy", "lr_scheduler", "scheduler"),
    "use --set schedule=step --set milestones=50% --set gamma=0.1": (
        *("lr_decay", "lr_decay_step_size", "lr_decay_iters", "lr_decay_rate", "step_size"),
    ),
    "use --set clip=NORM": ("clip_value", "clip_grad", "grad_clip", "max_grad_norm"),
    "use --loggers wandb": ("use_wandb", "wandb"),
    "use --loggers mlflow": ("use_mlflow", "mlflow"),
    "use --loggers tensorboard, or `paceline board`": ("display_id", "visdom"),
    "use `paceline evaluate` or `paceline apply`": ("eval", "evaluate", "test", "test_only", "phase", "num_test"),
}


COMMON: dict[str, str] = {name: advice for advice, names in _GROUPS.items() for name in names}
"""What to use instead of each setting, by the setting's name."""

# Setting names from other programs that are too different from ours to be found as a close match.
COMMON_ALIASES = {"learning_rate": "lr", "num_workers": "workers", "bs": "batch_size", "wd": "weight_decay"}
