"""Contracts between packages: recipe, data spec, importer."""
