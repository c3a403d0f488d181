"""Helpers that several of the server's HTTP APIs share."""
