"""Attach an expert cache to a transformers model, observe its passes, detach the cache."""
