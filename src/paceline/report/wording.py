"""Metrics and numbers as a report shows them."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.report.model import Summary

NO_VALUE = "–"
DISPLAY_NAMES = {"top1": "top-1", "top5": "top-5"}


def is_share(metric: str) -> bool:
    """Return whether a metric is a percentage of the evaluated samples."""
    return "/top" in metric


def heading_of_metric(name: str) -> str:
    """Return a metric name such as `test/top1` as a column heading: `test top-1, %`."""
    split, _, metric = name.partition("/")
    plain, bracket, label = metric.partition("[")
    unit = ", %" if is_share(name) else ""
    where = f" ({label.removesuffix(']')})" if bracket else ""
    return f"{split} {DISPLAY_NAMES.get(plain, plain)}{unit}{where}"


def metric_in_text(name: str) -> str:
    """Return a metric name such as `test/top1` for use in a sentence: `test top-1`."""
    return heading_of_metric(name).replace(", %", "")


def evaluated_images(name: str) -> str:
    """Return a name for the images on which a metric such as `validation/top1` is computed: `validation images`."""
    split = name.partition("/")[0]
    return "training images" if split == "train" else f"{split} images"


def metrics_in_order(qualities: Iterable[Iterable[str]], first: str) -> list[str]:
    """Return the names of all metrics without duplicates, starting with the most important one."""
    names = list(dict.fromkeys(name for quality in qualities for name in quality))
    return sorted(names, key=lambda name: name != first)


def format_of(name: str, value: float | None) -> str:
    """Return the number format of a metric, with more decimals for smaller values."""
    size = abs(value or 0.0)
    if is_share(name):
        return ".2f"
    return ".1f" if size >= 100 else ".2f" if size >= 10 else ".3f" if size >= 1 else ".4f"


def with_spread(spec: str, summary: Summary | None) -> str:
    """Return the mean, with ± standard deviation if there are several values."""
    if summary is None:
        return NO_VALUE
    return f"{summary.mean:{spec}}" + ("" if summary.std is None else f" ± {summary.std:{spec}}")


def metric_with_spread(name: str, summary: Summary | None) -> str:
    """Return the mean of a metric, with its spread."""
    return with_spread(format_of(name, summary.mean if summary else None), summary)


def percent(share: float | None, decimals: int = 0) -> str:
    """Return a fraction as a percentage."""
    return NO_VALUE if share is None else f"{share:.{decimals}%}".replace("%", " %")


def listed(labels: Iterable[str]) -> str:
    """Join labels with commas; labels that contain a comma are quoted."""
    return ", ".join(f"“{label}”" if "," in label else label for label in labels)
