"""Measurements of this machine: memory, disk, kernels and GPU."""
