"""Measurements: benchmark rounds of settings, recorded routing, a dry run of a machine."""
