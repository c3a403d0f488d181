"""Sampling: logits to tokens; reading: tokens to the text of an answer."""
