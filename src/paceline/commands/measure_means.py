"""The means of the metrics that `paceline measure` prints. Each metric is named after its protocol: `psnr[rgb]`."""

from __future__ import annotations

from collections.abc import Sequence

Row = dict[str, float]  # the metrics of one image, by name


def protocol_of(row: Row) -> str:
    """Return the protocol in the names of an image's metrics."""
    return next(name[len("psnr[") : -1] for name in row if name.startswith("psnr["))


def means_of(rows: Sequence[Row]) -> tuple[Row, list[str]]:
    """Return the means over the images of each protocol, and the protocols; LPIPS and NIQE if all of them have it."""
    means: Row = {}
    by_protocol: dict[str, list[Row]] = {}
    for row in rows:
        by_protocol.setdefault(protocol_of(row), []).append(row)
    for protocol, own in by_protocol.items():
        names = [name for name in own[0] if name.endswith(f"[{protocol}]") and all(name in row for row in own)]
        means |= {name: sum(row[name] for row in own) / len(own) for name in names}
    return means, list(by_protocol)
