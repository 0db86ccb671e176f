"""The link between devices, as set by the optional flags `--bandwidth 25GB/s` and `--latency 20us`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from paceline.benchmarking.scaling_forecast import Link
from paceline.core.errors import UserError

DEFAULT_LATENCY_SECONDS = 20e-6  # latency of one exchange between GPUs if only the bandwidth is set
NUMBER = r"\s*(\d+\.?\d*|\.\d+)((?:[eE][+-]?\d+)?)\s*"
SHORT = re.compile(NUMBER + r"([kKMGT]?)([bB])\s*(?:/\s*s|ps)?\s*")  # B means bytes, b means bits
AMBIGUOUS = re.compile(NUMBER + r"[kmgt]?b?\s*(?:/\s*s|ps)?\s*", re.IGNORECASE)
SPELLED = re.compile(NUMBER + r"([kmgt]?)(bits?|bytes?)\s*(?:/\s*s|ps)?\s*", re.IGNORECASE)
SECONDS = re.compile(NUMBER + r"(us|µs|ms|s)\s*")
PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


@dataclass(frozen=True)
class LinkOverride:
    """The bandwidth and latency that the user set; None for a value that was not set."""

    bytes_per_second: float | None
    latency_seconds: float | None

    @classmethod
    def parse(cls, bandwidth: str, latency: str) -> LinkOverride:
        """Parse `--bandwidth` and `--latency`; an empty string means that the flag was not set."""
        return cls(parse_bandwidth(bandwidth) if bandwidth else None, parse_seconds(latency) if latency else None)

    def apply(self, measured: Link | None) -> Link | None:
        """Return the link for predictions: the user's values if set, otherwise measured or default values."""
        if self.bytes_per_second is None and (self.latency_seconds is None or measured is None):
            return measured
        bandwidth = self.bytes_per_second
        if bandwidth is None:
            assert measured is not None
            bandwidth = measured.bytes_per_second
        latency = DEFAULT_LATENCY_SECONDS if self.latency_seconds is None else self.latency_seconds
        return Link(latency, bandwidth, devices=2)

    def describe(self, link: Link) -> str:
        """Describe the link, with the origin of each value."""
        measured = f"measured between {link.devices} processes"
        bandwidth = "as given" if self.bytes_per_second is not None else measured
        latency = "assumed" if self.bytes_per_second is not None else measured
        if self.latency_seconds is not None:
            latency = "as given"
        microseconds = link.latency_seconds * 1e6
        shown = f"{microseconds:,.0f}" if microseconds >= 10 else f"{microseconds:.2g}"
        speed = f"bandwidth {link.bytes_per_second / 1e9:.3g} GB/s ({bandwidth})"
        return f"{speed}; latency {shown} µs per exchange ({latency})"


def parse_bandwidth(text: str) -> float:
    """Convert `25GB/s`, `200Gbit/s` or `200Gbps` to bytes per second."""
    match = SHORT.fullmatch(text) or SPELLED.fullmatch(text)
    if not match:
        doubt = "bytes or bits? " if AMBIGUOUS.fullmatch(text) else ""
        raise UserError(f"--bandwidth {text}: {doubt}expected something like 25GB/s (bytes) or 200Gbit/s (bits)")
    number, exponent, prefix, unit = match.groups()
    in_bits = unit == "b" or unit.lower().startswith("bit")
    value = float(number + exponent) * PREFIXES[prefix.lower()] / (8 if in_bits else 1)
    if not 0 < value < math.inf:
        raise UserError(f"--bandwidth {text}: must be above 0 and finite; expected something like 25GB/s or 200Gbit/s")
    return value


def parse_seconds(text: str) -> float:
    """Convert `20us`, `0.1ms` or `1e-5s` to seconds."""
    match = SECONDS.fullmatch(text.lower())
    value = math.inf
    if match:
        value = float(match[1] + match[2]) * {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}[match[3]]
    if value == math.inf:
        raise UserError(f"--latency {text}: expected something like 20us or 0.1ms")
    return value
