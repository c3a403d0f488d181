"""Speculation: draft tokens from repeated text, and the decision how many to verify in a pass."""
