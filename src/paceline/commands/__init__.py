"""One module per command, written to be read from top to bottom."""
