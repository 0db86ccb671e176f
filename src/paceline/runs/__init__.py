"""Run folders: config, checkpoints, metrics, mirrors and loggers."""
