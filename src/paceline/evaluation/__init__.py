"""Judges: each file without a leading underscore measures what recipes predict; `Judge` is what they derive from."""

from paceline.evaluation._judge import Judge

__all__ = ["Judge"]
