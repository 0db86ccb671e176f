"""Measurements on this machine: steps, loaders, scaling."""
