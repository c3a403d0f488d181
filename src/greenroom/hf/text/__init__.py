"""Prompts and answers: chat templates, generation, tool calls."""
