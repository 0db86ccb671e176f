"""How a metric is called and how its values are shown."""

from __future__ import annotations

from typing import Any

from paceline.report.advice import is_share
from paceline.report.phrases import NOTHING, at

METRIC_WORDS = {"top1": "top-1", "top5": "top-5", "loss": "loss"}


def metric_words(name: str) -> str:
    """`test/top1` as a heading."""
    split, _, metric = name.partition("/")
    plain, bracket, label = metric.partition("[")
    unit = ", %" if plain.startswith("top") else ""
    where = f" ({label.removesuffix(']')})" if bracket else ""
    return f"{split} {METRIC_WORDS.get(plain, plain)}{unit}{where}"


def metric_said(name: str) -> str:
    """`test/top1` inside a sentence."""
    return metric_words(name).replace(", %", "")


def digits_for(name: str, summary: dict[str, Any] | None) -> str:
    """As many decimals as a metric's size leaves room for; mean and spread have the same."""
    size = abs(summary["mean"]) if summary else 0.0
    if is_share(name):
        return ".2f"
    return ".1f" if size >= 100 else ".2f" if size >= 10 else ".3f" if size >= 1 else ".4f"


def with_spread(spec: str, summary: dict[str, Any] | None, *path: str | int) -> str:
    """mean ± standard deviation, where there are several values."""
    if summary is None:
        return NOTHING
    mean = at(spec, *path, "mean")
    return mean if summary["std"] is None else f"{mean} ± {at(spec, *path, 'std')}"


def quality_of(group: dict[str, Any], name: str) -> str:
    """A group's metric, with its spread."""
    summary = group["quality"].get(name)
    return with_spread(digits_for(name, summary), summary, "groups", group["id"], "quality", name)
