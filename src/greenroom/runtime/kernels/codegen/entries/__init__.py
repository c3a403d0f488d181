"""Kernel entries: the compiled functions that threads enter, and their arguments."""
