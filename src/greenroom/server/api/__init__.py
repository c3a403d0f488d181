"""Routes of the HTTP APIs, one file each."""
