"""Stores: where experts' bytes are read from."""
