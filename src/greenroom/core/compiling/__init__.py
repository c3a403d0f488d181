"""The compile cache: Numba's compiled code on disk, under a digest of its sources."""
