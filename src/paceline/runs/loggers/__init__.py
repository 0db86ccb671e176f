"""Sinks for metrics and sample images besides the run's own files: one file per logger, named by `--loggers`."""
