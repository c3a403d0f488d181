"""Stores: the sources that experts' bytes are read from."""
