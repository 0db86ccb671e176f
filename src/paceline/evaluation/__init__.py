"""Metrics that evaluate predictions."""
