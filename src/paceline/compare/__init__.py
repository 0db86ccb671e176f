"""A grid of runs, its cells, and what is measured in addition."""
