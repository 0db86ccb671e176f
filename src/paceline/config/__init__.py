"""Settings: declare them, read them from files, resolve them."""
