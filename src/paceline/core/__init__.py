"""Errors, registry, files, locks: used by every other package."""
