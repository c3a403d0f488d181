"""Prefetching: predictions, their value, and the guard against slowdowns."""
