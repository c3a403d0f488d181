"""Kernel entries: compiled functions that threads enter, and their arguments."""
