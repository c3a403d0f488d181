"""Tests of the table of graphics cards, and of predictions from it."""
