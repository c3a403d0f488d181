"""Memory of this machine and process: sizes, page sizes, NUMA nodes."""
