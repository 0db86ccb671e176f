"""Built-in loaders, one per file; the file name is the loader's name."""
