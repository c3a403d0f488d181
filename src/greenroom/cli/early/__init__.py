"""Checks of options, and compilation of kernels, before heavy libraries are imported."""
