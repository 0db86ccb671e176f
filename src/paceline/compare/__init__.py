"""A grid of runs, its cells, and the additional measurements of a comparison."""
