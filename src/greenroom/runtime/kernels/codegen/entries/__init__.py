"""Compiled kernel functions that OpenMP threads enter, and their arguments."""
