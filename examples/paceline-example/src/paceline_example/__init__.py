"""A recipe and a source for Paceline, registered in `pyproject.toml`."""
