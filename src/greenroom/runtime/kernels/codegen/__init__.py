"""Functions that Numba compiles."""
