"""Ollama's API: chat, generate, and descriptions of the one served model."""
