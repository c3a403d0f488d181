"""Prompts and answers of a model: chat templates, generation, tool calls."""
