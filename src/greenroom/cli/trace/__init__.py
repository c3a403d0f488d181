"""Subcommands of `greenroom trace`: one file for each."""
