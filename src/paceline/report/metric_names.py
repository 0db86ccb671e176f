"""Display names of metrics, and the formatting of their values."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.report.advice import is_share
from paceline.report.model import Group, Summary
from paceline.report.phrases import NO_VALUE, at

DISPLAY_NAMES = {"top1": "top-1", "top5": "top-5", "loss": "loss"}


def metric_heading(name: str) -> str:
    """Return a metric name such as `test/top1` as a column heading: `test top-1, %`."""
    split, _, metric = name.partition("/")
    plain, bracket, label = metric.partition("[")
    unit = ", %" if plain.startswith("top") else ""
    where = f" ({label.removesuffix(']')})" if bracket else ""
    return f"{split} {DISPLAY_NAMES.get(plain, plain)}{unit}{where}"


def metric_unit(name: str) -> str:
    """Return the label of a plot's axis for a metric: its unit, or else its name without the split."""
    return "%" if is_share(name) else metric_in_text(name).partition(" ")[2]


def metric_in_text(name: str) -> str:
    """Return a metric name such as `test/top1` for use in a sentence: `test top-1`."""
    return metric_heading(name).replace(", %", "")


def evaluated_images(name: str) -> str:
    """Return a name for the images on which a metric such as `validation/top1` is computed: `validation images`."""
    split = name.partition("/")[0]
    return "training images" if split == "train" else f"{split} images"


def metrics_in_order(qualities: Iterable[Iterable[str]], first: str) -> list[str]:
    """Return the names of all metrics without duplicates, starting with the most important one."""
    names = list(dict.fromkeys(name for quality in qualities for name in quality))
    return sorted(names, key=lambda name: name != first)


def format_for(name: str, summary: Summary | None) -> str:
    """Return a number format for a metric's mean and spread, with more decimals for smaller values."""
    size = abs(summary.mean) if summary else 0.0
    if is_share(name):
        return ".2f"
    return ".1f" if size >= 100 else ".2f" if size >= 10 else ".3f" if size >= 1 else ".4f"


def with_spread(spec: str, summary: Summary | None, *path: str | int) -> str:
    """Return the mean, with ± standard deviation if there are several values."""
    if summary is None:
        return NO_VALUE
    mean = at(spec, *path, "mean")
    return mean if summary.std is None else f"{mean} ± {at(spec, *path, 'std')}"


def quality_of(group: Group, name: str) -> str:
    """Return a group's value for a metric, with its spread."""
    summary = group.quality.get(name)
    return with_spread(format_for(name, summary), summary, "groups", group.id, "quality", name)
