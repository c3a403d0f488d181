"""Command-line options, made from the fields of the config dataclasses."""
