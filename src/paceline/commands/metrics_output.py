"""Prints metrics for the commands `evaluate` and `measure`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from paceline.core.printable import print_line
from paceline.evaluation.protocol import Protocol


def print_metrics(metrics: Mapping[str, float], protocol: Protocol, notes: Iterable[str]) -> None:
    """Print one line per metric, then the protocol (the conditions of the measurement) and notes."""
    width = max(map(len, metrics))
    for name, value in metrics.items():
        print_line(f"  {name:<{width}}  {value:.8g}")
    if protocol:
        print_line("measured with " + ", ".join(f"{name} {value}" for name, value in protocol.items()))
    for note in notes:
        print_line(note)
