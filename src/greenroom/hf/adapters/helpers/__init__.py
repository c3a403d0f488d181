"""Code shared by the adapters of several architectures."""
