"""Built-in sources, one per file; the file name is the source's name."""
