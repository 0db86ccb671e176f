"""The remote copy of a run."""
