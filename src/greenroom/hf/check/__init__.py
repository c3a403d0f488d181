"""Checks of a model with streamed experts: equality with transformers, and quality."""
