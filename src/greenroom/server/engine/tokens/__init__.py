"""Sampling of tokens from logits, and reading of tokens as an answer's text."""
