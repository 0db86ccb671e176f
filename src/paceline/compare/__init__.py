"""A comparison: the grid of runs to train, and additional measurements."""
