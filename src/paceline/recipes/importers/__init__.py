"""Importers: one file per project whose weight files can be read."""
