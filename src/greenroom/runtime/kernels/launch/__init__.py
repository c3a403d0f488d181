"""Launching kernel entries: one, or several in one parallel region."""
