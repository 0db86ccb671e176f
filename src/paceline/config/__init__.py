"""Settings: declarations, files and resolution."""
