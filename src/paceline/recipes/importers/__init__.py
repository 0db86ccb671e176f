"""Importers: one module per project whose weight files can be read."""
