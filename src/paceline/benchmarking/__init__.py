"""Benchmarks on this machine: training steps, loaders and scaling over several devices."""
