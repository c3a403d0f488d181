"""Functions that Numba compiles, and how they are compiled and cached."""
