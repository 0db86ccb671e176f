"""Importers: weight files of other projects."""
