"""Loaders: the name of a file here is the name of a loader."""
