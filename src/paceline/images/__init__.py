"""Images in files and in memory."""
