"""Tests of studies in Python."""
