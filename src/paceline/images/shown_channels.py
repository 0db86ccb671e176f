"""The channels of an image that are shown in sample images: one in grey, or three as red, green and blue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from paceline.core.errors import UserError


@dataclass(frozen=True)
class ShownChannels:
    """One or three channels, counted from 0. By default, images with 1 or 3 channels are shown as they are."""

    indices: tuple[int, ...] = ()  # empty for the default

    @classmethod
    def parse(cls, text: str, channels: int) -> ShownChannels:
        """Parse the setting `preview_channels` for images with a number of channels."""
        try:
            indices = tuple(int(part) for part in text.split(",")) if text else ()
        except ValueError:
            indices = (-1,)
        if text and (len(indices) not in (1, 3) or not all(0 <= index < channels for index in indices)):
            raise UserError(
                f"preview_channels={text}: must be one or three of the channels 0 to {channels - 1}, e.g. "
                f"preview_channels={'0,1,2' if channels > 2 else '0'}"
            )
        return cls(indices)

    def of(self, images: NDArray[Any]) -> NDArray[Any]:
        """Return the shown channels of images, whose last dimension is the channels."""
        channels = images.shape[-1]
        if self.indices and max(self.indices) < channels:
            return images[..., list(self.indices)]
        return images if channels in (1, 3) else images[..., : 3 if channels > 2 else 1]
