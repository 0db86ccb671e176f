"""Components shared by several recipes."""
