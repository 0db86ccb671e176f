"""Contracts between packages: recipe, data spec, importer, step ladder."""
