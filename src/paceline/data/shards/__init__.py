"""Tar files in the WebDataset layout: finding them, indexing them, reading ranges of them, and writing them."""
