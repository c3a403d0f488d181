"""The server's ASGI app, its middleware, and the socket that serves the app."""
