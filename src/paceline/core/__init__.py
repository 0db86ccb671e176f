"""Errors, the plugin registry, files and locks, used by all other packages."""
