"""From logits to tokens, and from tokens to the text of an answer."""
