"""A live page over run folders, here or behind a URL; it reads runs and changes nothing."""
