"""Packed folders, in which images are stored decoded."""
