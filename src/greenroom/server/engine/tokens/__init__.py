"""Sampling of tokens from logits, and conversion of an answer's tokens to text."""
