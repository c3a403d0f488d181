"""The app, its middleware, and the socket that it is served on."""
