"""The runtime: it reads and computes a model's experts as the expert scheduler decides."""
