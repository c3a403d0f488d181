"""Prompt cache on disk: keys and values of prefixes, as a second tier below the prefix cache."""
