"""Measurements of this machine: memory, disk, kernels, GPU."""
