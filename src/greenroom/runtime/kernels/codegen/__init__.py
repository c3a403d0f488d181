"""Kernel code that Numba compiles for CPUs, and LLVM code for it."""
