"""Reads, writes, resamples and arranges images."""
