"""Packed folders: every image decoded once."""
