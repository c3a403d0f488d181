"""Stored history of earlier runs: routing, measurements and settings."""
