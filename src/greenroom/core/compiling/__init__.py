"""Compiled code on disk, under a digest of what it is made of."""
