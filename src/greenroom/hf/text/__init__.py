"""Chat templates, text generation and tool calls of a model."""
