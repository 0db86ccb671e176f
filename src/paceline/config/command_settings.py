"""Settings that are not flags of every command, and defaults that differ between commands."""

from __future__ import annotations

# Commands that run only a few steps do not have flags for these settings, which affect complete runs.
_WHOLE_RUN_SETTINGS = (
    *("strategy", "nnodes", "rdzv", "max_restarts", "epochs", "images", "inception", "inception_sha256"),
    *("out", "mirror", "resume_from", "check_replicas", "loggers", "profile"),
)
# `verify` always uses float64 without CUDA graphs.
SETTINGS_NOT_IN_VERIFY = (*_WHOLE_RUN_SETTINGS, "precision", "graph")
# `plan` prints the learning rates for linear and for square-root scaling.
SETTINGS_NOT_IN_PLAN = (*_WHOLE_RUN_SETTINGS, "init_from", "scale_lr")

STRATEGIES = "single,ddp"  # for `compare` and `verify`
# The default of `--devices` for commands that use several devices.
VERIFY_DEVICES = 2
COMPARE_DEVICES = 2
PLAN_DEVICES = 8
