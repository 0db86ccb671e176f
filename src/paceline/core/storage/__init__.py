"""Reads ranges of files in local folders and at URLs, with a cache on the local disk."""
