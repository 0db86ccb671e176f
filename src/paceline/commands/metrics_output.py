"""Prints metrics for the commands `evaluate` and `measure`."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from paceline.core.printable import print_line
from paceline.evaluation.protocol import Protocol


def print_metrics(
    metrics: Mapping[str, float], protocol: Protocol, notes: Iterable[str], percentages: Container[str] = ()
) -> None:
    """Print one line per metric, then the protocol (the conditions of the measurement) and notes.

    The metrics in `percentages` get a percent sign.
    """
    width = max(map(len, metrics))
    for name, value in metrics.items():
        print_line(f"  {name:<{width}}  {value:.8g}{'%' * (name in percentages)}")
    if protocol:
        print_line("measured with " + ", ".join(f"{name} {value}" for name, value in protocol.items()))
    for note in notes:
        print_line(note)
