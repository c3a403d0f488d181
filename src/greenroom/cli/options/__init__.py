"""Command-line options, made from the config dataclasses."""
