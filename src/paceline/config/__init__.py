"""Settings: declared, resolved, read from files."""
