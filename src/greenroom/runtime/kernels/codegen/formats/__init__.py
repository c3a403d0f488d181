"""Compiled products with quantised weights: code that reads, decodes and multiplies each format."""
