"""What a person asks for: one file per command; files that start with `_` hold the parts of several."""
