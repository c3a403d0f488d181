"""Checks and compilation that begin before heavy imports."""
