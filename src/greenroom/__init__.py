"""Greenroom."""
