"""Settings as flags of commands, and the names that other programs use for settings."""

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


ALIASES = {
    alias: name
    for name, aliases in {
        "accelerator": "cuda no_cuda use_gpu device",
        "backend": "dist_backend",
        "batch_size": "batchSize train_batch_size bs",
        "beta1": "b1 beta_1",
        "beta2": "b2 beta_2",
        "channels": "nc in_channels num_channels n_channels",
        "clip": "clip_value clip_grad grad_clip max_grad_norm",
        "crop": "crop_size patch_size fineSize random_crop",
        "data": "dataset dataset_name",
        "data_root": "dataroot data_dir data_path data_source train_dir train_source",
        "devices": "ngpu n_gpu nGPU num_gpu num_gpus n_GPUs world_size nproc_per_node",
        "epochs": "n_epochs num_epochs max_epochs epoch",
        "evaluate_every": "eval_freq eval_interval eval_step val_freq val_interval",
        "gpus": "gpu gpu_id gpu_ids",
        "images": "niter n_iters num_iters total_iter max_steps total_steps",
        "init_from": "pretrain pretrained pretrain_path ckpt ckpt_path load_path weight",
        "log_every": "print_freq log_freq log_interval log_step",
        "loggers": "use_wandb wandb use_mlflow mlflow display_id visdom",
        "lr": "learning_rate",
        "milestones": "lr_decay_step_size lr_decay_iters step_size",
        "nnodes": "nodes num_nodes",
        "out": "name exp_name outf out_dir output_dir save_dir save_path savetag log_dir checkpoints_dir results_dir",
        "precision": "amp use_amp fp16 mixed_precision",
        "sample_every": "sample_interval sample_freq display_freq",
        "save_every": "save_freq save_interval save_epoch_freq save_latest_freq",
        "schedule": "lr_policy lr_scheduler scheduler",
        "seed": "manualSeed manual_seed random_seed",
        "size": "image_size img_size imageSize input_size resize",
        "weight_decay": "wd",
        "workers": "threads num_threads nThreads n_cpu n_threads num_workers",
    }.items()
    for alias in aliases.split()
}
"""The setting that other programs call by another name, by that name."""
