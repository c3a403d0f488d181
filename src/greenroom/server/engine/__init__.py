"""Continuous batching over one model, without HTTP."""
