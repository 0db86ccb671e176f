"""Pieces that several recipes share."""
