"""The error of a run that has diverged: what happened, the last checkpoint, and how to train again."""

from __future__ import annotations

import shlex

from paceline.runs.folder import RunFolder
from paceline.runs.other_folder import suggest_other_folder
from paceline.training.build import Parts

SMALLER_LR = 0.1  # factor on the learning rate in the suggested command


def explain_divergence(what: str, at: int, parts: Parts, folder: RunFolder) -> str:
    """Return the error message for what went wrong after `at` images.

    A run keeps its learning rate when it resumes, so a run that has checkpoints cannot be repaired in its own folder.
    """
    step = at // parts.feed.images_per_step
    remedies = ["a lower learning rate"]
    remedies += [] if parts.precision.name in ("fp32", "fp64") else ["--precision fp32"]
    remedies += [] if parts.config.learner.clip else ["--set clip=1"]
    flags = " ".join(filter(None, (_start_elsewhere(parts, folder), _lower_rates(parts))))
    problem = f"{what} at step {step} ({at:,} images seen); {folder.checkpoints.describe_newest()}"
    return f"{problem}. {' or '.join(remedies).capitalize()} may help: add {flags} to the command"


def _start_elsewhere(parts: Parts, folder: RunFolder) -> str:
    """Return the flags for a new run that starts from the weights of this run; empty if it has no checkpoints."""
    if not folder.checkpoints.all():
        return ""
    config, out = parts.config, folder.path
    is_stage = any(out.name in stages for stages in config.recipe_class.stages.values())
    start = "" if is_stage else f"--init-from {shlex.quote(str(out))} "  # a stage has its own initial weights
    return f"{start}{suggest_other_folder(out, config)}"


def _lower_rates(parts: Parts) -> str:
    """Return the flags for a lower learning rate of all networks."""
    config = parts.config
    own = {name: config.learner_of(name).lr for name, values in config.networks.items() if "lr" in values}
    flags = [f"--lr {config.learner.lr * SMALLER_LR:g}"] if own.keys() < parts.recipe.networks.keys() else []
    return " ".join([*flags, *(f"--set {name}.lr={lr * SMALLER_LR:g}" for name, lr in own.items())])
