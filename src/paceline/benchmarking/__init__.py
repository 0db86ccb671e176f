"""Benchmarks on this machine: training steps, loaders and scaling across several devices."""
