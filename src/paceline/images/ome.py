"""The parts of OME-XML that also apply to results: channel names and the size of a pixel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree


def is_ome(description: str) -> bool:
    """Return whether the description of a TIFF is OME-XML."""
    return description.rstrip("\0 \r\n").endswith("OME>")


@dataclass(frozen=True)
class Ome:
    """Metadata of an OME-TIFF."""

    channel_names: tuple[str, ...] = ()
    pixel_size: tuple[float, float] | None = None  # width and height of a pixel
    units: tuple[str, str] = ("µm", "µm")
    width_px: int = 0  # width of the image that the pixel size belongs to
    is_one_page: bool = False  # whether the image is one grey or RGB page, rather than one plane per channel

    @classmethod
    def parse(cls, text: str) -> Ome:
        """Return the metadata in OME-XML; parts that cannot be read are left out."""
        try:
            pixels = ElementTree.fromstring(text).find(".//{*}Pixels")
        except ElementTree.ParseError:
            return cls()
        if pixels is None:
            return cls()
        names = tuple(channel.get("Name", "") for channel in pixels.findall("{*}Channel"))
        units = (pixels.get("PhysicalSizeXUnit", "µm"), pixels.get("PhysicalSizeYUnit", "µm"))
        try:
            size = float(pixels.attrib["PhysicalSizeX"]), float(pixels.attrib["PhysicalSizeY"])
            return cls(names if all(names) else (), size, units, int(pixels.attrib["SizeX"]))
        except (KeyError, ValueError):
            return cls(names if all(names) else ())

    def for_result(self, channels: int, width_px: int) -> dict[str, Any]:
        """Return the metadata of a result, as tifffile expects it; the pixels of an enlarged result are smaller."""
        found: dict[str, Any] = {}
        if len(self.channel_names) == channels:
            found["Channel"] = {"Name": list(self.channel_names)}
        if self.pixel_size and self.width_px:
            width, height = (side * self.width_px / width_px for side in self.pixel_size)
            found |= {"PhysicalSizeX": width, "PhysicalSizeY": height}
            found |= {"PhysicalSizeXUnit": self.units[0], "PhysicalSizeYUnit": self.units[1]}
        return found
