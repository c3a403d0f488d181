"""LLVM vector code for the kernels, which Numba's own front end cannot express."""
