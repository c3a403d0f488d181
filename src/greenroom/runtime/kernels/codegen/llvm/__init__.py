"""Vectors: what Numba's own front end cannot say, as LLVM code."""
