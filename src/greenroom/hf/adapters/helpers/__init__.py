"""Code that several architectures' adapters share."""
