"""Measure settings in benchmark rounds, record routing, and measure a machine by a dry run."""
