"""A live page over run folders, local or behind a URL; it only reads runs."""
