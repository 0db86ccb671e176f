"""A recipe and a source for Paceline; `pyproject.toml` registers them."""
