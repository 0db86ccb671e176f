"""One file per command; each reads from top to bottom."""
