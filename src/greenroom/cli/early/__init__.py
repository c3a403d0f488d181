"""Checks of options, and compilation of kernels, that begin before heavy imports."""
