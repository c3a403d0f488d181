"""Memory of this machine and process: sizes, page sizes and NUMA nodes."""
