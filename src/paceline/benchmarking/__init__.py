"""Measurements of this machine: steps, loaders, scaling."""
