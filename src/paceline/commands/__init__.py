"""One file per command; each reads top to bottom."""
