"""Attach an expert cache to a transformers model, and detach it."""
