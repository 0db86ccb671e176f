"""Interfaces that several packages share: recipe, data spec, weight importer and step timings."""
