"""LLVM vector code for CPU kernels, which Numba's own front end cannot express."""
