"""Backends of the terminal chat: a model in this process, or a server."""
