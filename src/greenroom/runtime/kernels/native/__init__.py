"""Load the kernels that are written in C++ (folder native/), and describe their arguments."""
