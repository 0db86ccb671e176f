"""A check for losses whose networks were trained on photographs."""

from __future__ import annotations

from paceline.core.errors import UserError


def check_colours(setting_text: str, network: str, channels: int) -> None:
    """Raise UserError if a network that was trained on photographs cannot process images with these channels."""
    if channels not in (1, 3):
        name = setting_text.partition("=")[0]
        raise UserError(
            f"{setting_text}: {network} takes images with 1 or 3 channels, not {channels}; use --set {name}=0"
        )
