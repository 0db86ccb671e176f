"""Images that are read and written by region, because they may be larger than memory."""
