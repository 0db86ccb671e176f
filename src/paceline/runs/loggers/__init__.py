"""Optional loggers for metrics and sample images: one file per logger, chosen with `--loggers`."""
