"""The HTTP server and the terminal chat, through which people and programs use a model."""
